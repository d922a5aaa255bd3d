"""Models, a tokenizer, data and settings small enough to train in a test."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_linear_attn.distill import Data, DistillationSettings
from hf_linear_attn.distill.data import Blocking, Document, DocumentBlocks, RecallRows
from hf_linear_attn.evaluation.tasks.base import bos_ids


def tiny_settings(preset: str = "recommended", **changes: object) -> DistillationSettings:
    """Return a preset's settings for short sequences, all of whose steps are logged and nothing else is shown."""
    sizes = {"window": 4, "sinks": 1, "block_tokens": 16, "rows": 2}
    shown = {"heldout_rows": 0, "log_every": 1, "progress": False}
    return DistillationSettings.from_preset(preset, **(sizes | shown | changes))


def tiny_data(part: slice = slice(None)) -> Data:
    """Return some of 40 random documents, beside recall sequences."""
    rng, tokenizer = random.Random(0), byte_tokenizer()
    documents = [Document([rng.randrange(3, 250) for _ in range(rng.randrange(20, 90))]) for _ in range(40)]
    blocks = DocumentBlocks(documents[part], Blocking(bos_ids(tokenizer), 16), seed=0)
    recall = RecallRows(tokenizer, seed=0)
    return Data(blocks, recall, recall_share=0.25, answer_weight=4.0, pad=0)


def save_files(folder: Path, **changes: object) -> Path:
    """Save a teacher and texts to learn from, as a user would have them."""
    tiny_teacher(**changes).save_pretrained(folder / "teacher")
    byte_tokenizer().save_pretrained(folder / "teacher")
    (folder / "texts").mkdir()
    for n in range(25):
        (folder / "texts" / f"{n:02d}.txt").write_text(f"text number {n} " * 10)
    return folder


def kill_at(step: int) -> Callable[[dict[str, Any]], None]:
    """Return a callback that kills the process at a step of `distill` (0: never)."""

    def callback(record: dict[str, Any]) -> None:
        if (record["stage"], record["step"]) == ("distill", step):
            os.kill(os.getpid(), signal.SIGKILL)

    return callback


def killed(module: str, *arguments: object) -> None:
    """Call a module's `killed_run` in a process of its own, which has to be killed in it."""
    code = f"from {module} import killed_run; killed_run(*{arguments!r})"
    root = Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Tell whether two models have the same weights, bit for bit."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tokenizer_of_bytes(frame: str, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that lays a text out in a frame; special tokens, by name, have the first numbers."""
    names = list(special.values())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(names + alphabet)}, merges=[]))
    tokenizer.add_special_tokens(names)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    framing = [(name, number) for number, name in enumerate(names) if name in frame]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=framing)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of_bytes("<bos> $A", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def tiny_teacher(layers: int = 2, **changes: object) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            **{
                "vocab_size": 259,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 256,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                # Large weights: a model whose outputs depend on its inputs.
                "initializer_range": 0.3,
            }
            | changes
        )
        return LlamaForCausalLM(config).eval()


def tiny_gpt2(positions: int) -> GPT2LMHeadModel:
    """Return a model whose positions run out."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=259, n_embd=16, n_layer=2, n_head=2, n_positions=positions, bos_token_id=1, eos_token_id=2
        )
        return GPT2LMHeadModel(config).eval()


def tiny_multimodal() -> Gemma3ForConditionalGeneration:
    """Return a model that also sees images, whose language model has a config of its own."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    text = {"vocab_size": 259, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8}
    text |= {"layer_types": ["full_attention"] * 2, "max_position_embeddings": 256}
    images = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Gemma3Config(
            text_config=sizes | text, vision_config=sizes | images, mm_tokens_per_image=4, image_token_id=258
        )
        return Gemma3ForConditionalGeneration(config).eval()
