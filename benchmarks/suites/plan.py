"""Plan against measurement: the memory that `plan` counts for a step beside the peak that torch's allocator reports.

    python benchmarks/run.py --suite plan

Small models of several shapes, on a CPU, every stage and recipe in a run of its own. The peak is that of the second
step, when the optimiser's state is there, in bytes allocated since before the models were built. With ``--vocabulary``
a model of that vocabulary is measured too, with its losses in pieces and with whole logits.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import facts_line, markdown, provenance, write
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from hf_linear_attn.distill import Data, DistillationSettings, distill, forward
from hf_linear_attn.distill.data import Row
from hf_linear_attn.distill.plan import GIB, Plan, plan

MIB = 2**20
SIZES = {"hidden_size": 256, "num_attention_heads": 4}
MODELS: dict[str, PreTrainedConfig] = {
    "llama, 4 layers, vocabulary 4k": LlamaConfig(
        **SIZES, vocab_size=4096, intermediate_size=704, num_hidden_layers=4, num_key_value_heads=2
    ),
    "qwen2, 2 layers, tied, vocabulary 32k": Qwen2Config(
        **SIZES,
        vocab_size=32768,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "gpt2, 6 layers, tied, vocabulary 8k": GPT2Config(
        vocab_size=8192, n_embd=256, n_head=8, n_layer=6, n_positions=1024, bos_token_id=0, eos_token_id=0
    ),
}
LLAMA_8B = LlamaConfig(
    name_or_path="Llama-3-8B",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    dtype="bfloat16",
)
TEXT = {"block_tokens": 256, "rows": 2}
RECIPES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # Name: model, checkpoint's dtype, preset, changes; the stage stands in the changes.
    "transfer": ("llama", "float32", "recommended", {"stages": ["transfer"]}),
    "transfer, no window, bf16": (
        "gpt2",
        "bfloat16",
        "recommended",
        {"stages": ["transfer"], "window": None, "sinks": 0},
    ),
    "transfer, single_gpu": ("qwen2", "bfloat16", "single_gpu", {"stages": ["transfer"]}),
    "distill": ("llama", "float32", "recommended", {"stages": ["distill"]}),
    "distill, bf16": ("qwen2", "bfloat16", "recommended", {"stages": ["distill"]}),
    "distill, recomputed": ("gpt2", "float32", "recommended", {"stages": ["distill"], "gradient_checkpointing": True}),
    "distill, elu": ("gpt2", "float32", "elu", {}),
    "distill, single_gpu": ("llama", "bfloat16", "single_gpu", {"stages": ["distill"]}),
    "distill, single_gpu, large vocabulary": ("qwen2", "bfloat16", "single_gpu", {"stages": ["distill"]}),
    "distill, lolcats": ("llama", "float32", "lolcats", {"stages": ["distill"]}),
    "transfer, decay": ("llama", "float32", "recommended", {"stages": ["transfer"], "update_rule": "decay"}),
    "distill, decay": ("gpt2", "float32", "recommended", {"stages": ["distill"], "update_rule": "decay"}),
    "distill, gated_delta": ("llama", "float32", "recommended", {"stages": ["distill"], "update_rule": "gated_delta"}),
    "distill, lean": (
        "qwen2",
        "bfloat16",
        "recommended",
        {"stages": ["distill"], "optimizer": "adamw_8bit", "master_weights": "compensated"},
    ),
    "extend, accumulated": (
        "llama",
        "float32",
        "recommended",
        {"stages": ["extend"], "extend_factor": 2, "accumulation": 2},
    ),
}


class FullRows:
    """Texts of random tokens that fill their rows."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def block(self, number: int, length: int) -> Row:
        """Return a row."""
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, self.vocabulary, (length,), generator=generator).tolist()
        return Row(ids, [0.0] + [1.0] * (length - 1))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that nothing is asked of."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")))


def measured_bytes(config: PreTrainedConfig, dtype: str, settings: DistillationSettings) -> int:
    """Run two steps and return the most bytes that were allocated in the second."""
    rows = Data(FullRows(config.vocab_size), None, recall_share=0.0, answer_weight=1.0, pad=0)  # type: ignore[arg-type]

    def build(*arguments: Any, **options: Any) -> PreTrainedModel:
        # Weights that a file lends are no allocator's.
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        return model.to(options.get("dtype", model.dtype)).eval()

    def mark(record: dict[str, Any]) -> None:
        with record_function(f"after step {record['step']}"):
            pass

    with (
        mock.patch("hf_linear_attn.distill.models._load_model", build),
        mock.patch("hf_linear_attn.distill.models.load_config", return_value=config),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found,
    ):
        distill(settings, tokenizer=tokenizer(), data=(rows, rows), on_step=mark)
    first, last, events = math.inf, -math.inf, []
    for event in walk(found.profiler.kineto_results.experimental_event_tree()):
        if event.name == "after step 1":
            first = event.start_time_ns
        elif event.name == "after step 2":
            last = event.start_time_ns
        elif event.name == "[memory]":
            events.append((event.start_time_ns, event.extra_fields.total_allocated))
    return max(total for when, total in events if first < when < last)


def walk(events: Sequence[Any]) -> Iterator[Any]:
    """Yield the events of a tree."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def settings_of(preset: str, changes: dict[str, Any]) -> DistillationSettings:
    """Return two steps of a recipe."""
    steps = {"transfer_steps": 2, "distill_steps": 2, "extend_steps": 2, "warmup_share": 0.0}
    run = {"model": "built", "recall_share": 0.0, "heldout_rows": 0, "log_every": 1, "progress": False}
    window = {} if "window" in changes or preset == "elu" else {"window": 64}
    return DistillationSettings.from_preset(preset, **{**TEXT, **steps, **run, **window, **changes})


def planned(config: PreTrainedConfig, dtype: str, settings: DistillationSettings) -> Plan:
    """Return the plan of the same run, on a CPU."""
    sized = type(config).from_dict(config.to_dict() | {"dtype": dtype})
    return plan(sized, settings, gpus=1, device="cpu")


def vocabulary_rows(vocabulary: int) -> list[dict[str, Any]]:
    """Measure a model of a large vocabulary with its logits in pieces and whole."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    settings = settings_of("single_gpu", {"stages": ["distill"], "block_tokens": 512, "rows": 4})
    pieces = measured_bytes(config, "bfloat16", settings)
    with mock.patch.object(forward, "PIECE_BYTES", 2**62):
        whole = measured_bytes(config, "bfloat16", settings)
    rows = (("whole", whole, None), ("in pieces", pieces, planned(config, "bfloat16", settings).total_gib * GIB))
    return [
        {
            "vocabulary": vocabulary,
            "logits": name,
            "planned MiB": counted and counted / MIB,
            "measured MiB": found / MIB,
            "share": f"{found / whole:.1%}",
        }
        for name, found, counted in rows
    ]


def parser() -> argparse.ArgumentParser:
    """Return the suite's arguments."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="all by default")
    found.add_argument("--vocabulary", type=int, default=131072, help="of the model with whole logits; 0 for none")
    found.add_argument("--output", type=Path, default=Path("docs/results/plan.json"), help="result, a JSON file")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    arguments = parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name in arguments.recipes:
        shape, dtype, preset, changes = RECIPES[name]
        label, config = next((key, value) for key, value in MODELS.items() if key.startswith(shape))
        settings = settings_of(preset, changes)
        found = measured_bytes(config, dtype, settings)
        counted = planned(config, dtype, settings).total_gib * GIB
        row = {"recipe": name, "model": label, "dtype": dtype, "stage": settings.stages[0]}
        row |= {"planned MiB": counted / MIB, "measured MiB": found / MIB, "error": f"{counted / found - 1:+.2%}"}
        rows.append(row)
        print(json.dumps(row), flush=True)
    large = vocabulary_rows(arguments.vocabulary) if arguments.vocabulary else []
    facts = provenance("plan", argv or [])
    # Steps of 4096 tokens.
    predicted = plan(LLAMA_8B, DistillationSettings.from_preset("single_gpu"))
    result = {"provenance": facts, "rows": rows, "vocabulary": large, "8B GiB": predicted.total_gib}
    write(arguments.output, result, page(facts, rows, large, predicted))


def page(facts: dict[str, Any], rows: list[dict[str, Any]], large: list[dict[str, Any]], predicted: Plan) -> str:
    """Return the result in words."""
    worst = max(abs(row["planned MiB"] / row["measured MiB"] - 1) for row in rows)
    text = f"""# What `plan` counts, and what is measured

{facts_line(facts)}
`hf-linear-attn plan` runs a step of each stage without numbers and counts what is alive. Here the same step is run with
numbers, on a CPU, and the peak is read from torch's allocator: of {len(rows)} runs the worst is off by {worst:.2%}.

Not measured: GPUs. For one, `plan` counts what our kernels' ops allocate, and torch's operations as its CPU has them;
what drivers and allocators take besides is no part of it, so it calls a plan fitting up to 95% of a GPU. Nor are
counted the weights that a quantisation unpacks for a moment, texts that are packed, and the figures of held-out text
at the end, which load the teacher if no stage did.

"""
    text += markdown(rows)
    if large:
        text += """
A vocabulary that is large beside its model: 2 layers of width 32, the preset `single_gpu`, 2048 tokens a step, with
logits in pieces and whole:

"""
        text += markdown(large)
    text += f"""
Predicted, not measured: 8B parameters on one GPU with the preset `single_gpu`, 4096 tokens a step, hours of an H100 at
40% of its peak.

{predicted.table()}
"""
    return text
