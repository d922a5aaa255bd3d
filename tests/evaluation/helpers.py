"""Models and a tokenizer small enough to know what they must score."""

import copy
import re
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_linear_attn import patch_model
from hf_linear_attn.evaluation.subjects import Subject

SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS, PAD = 256, 257, 258
VOCABULARY = 259
QUESTION = re.compile(
    r"(pass key is|code of \w+ is|provided text (is|are)|they are:|in the list are:|list of words is:"
    r"|appeared words are:|capital of \w+ is|^\w+ =|^\w+\(mode=|\"city\":)",
    flags=re.MULTILINE,
)


def byte_level(vocab, merges=(), *, bos=None, **tokens):
    """Make a tokenizer of byte-level BPE that puts the token `<bos>`, where one is given, before every text."""
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def byte_tokenizer(*, bos=True, chat=False):
    """Make a tokenizer of bytes with EOS and padding tokens, and a BOS it puts before every text."""
    vocab = {symbol: i for i, symbol in enumerate(SYMBOLS)} | {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = byte_level(vocab, bos=BOS if bos else None, **tokens)
    if chat:
        tokenizer.chat_template = "<bos>User: {{ messages[0]['content'] }}\nAssistant:"
    return tokenizer


def tiny_llama(seed=0, **options):
    """Make a random softmax Llama of two layers."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "max_position_embeddings": 4096,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "initializer_range": 0.2,
        **options,
    }
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def tiny_linear(seed=0, **options):
    """Make a random patched Llama of two layers."""
    return patch_model(tiny_llama(seed), **{"feature_map": "elu", "window": 16, **options}).eval()


def tiny_gpt2(positions=320):
    """Make a random GPT-2 whose positions end."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=positions, bos_token_id=BOS, eos_token_id=EOS
    )
    return GPT2LMHeadModel(config).eval()


def subject(model, name="model", role="model"):
    return Subject(name=name, role=role, model=model, path=None)


class History:
    """A cache that keeps the tokens themselves."""

    def __init__(self):
        self.ids = None

    def reorder_cache(self, beam_idx):
        self.ids = self.ids.index_select(0, beam_idx)


class ScriptedModel(PreTrainedModel):
    """A causal language model whose next token is what `script` makes of all tokens so far.

    `script` takes the ids of a row without padding and returns the next id, or a row of logits.
    """

    config_class = PreTrainedConfig

    def __init__(self, script):
        super().__init__(PreTrainedConfig(vocab_size=VOCABULARY))
        self.embedding = nn.Embedding(VOCABULARY, 2)
        self.head = nn.Linear(2, VOCABULARY, bias=False)
        self.script = script
        self.tokens_read = 0
        self.generation_config = GenerationConfig(eos_token_id=EOS)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        position_ids=None,
        use_cache=True,
        logits_to_keep=0,
    ):
        cache = copy.copy(past_key_values) or History()
        before = 0 if cache.ids is None else cache.ids.shape[1]
        cache.ids = input_ids if cache.ids is None else torch.cat([cache.ids, input_ids], dim=1)
        self.tokens_read += input_ids.numel()
        total = cache.ids.shape[1]
        mask = torch.ones_like(cache.ids) if attention_mask is None else attention_mask
        first = total - logits_to_keep if logits_to_keep else before
        logits = torch.stack(
            [
                torch.stack(
                    [self._logits(row[:stop][keep[:stop].bool()].tolist()) for stop in range(first + 1, total + 1)]
                )
                for row, keep in zip(cache.ids, mask, strict=True)
            ]
        )
        return SimpleNamespace(logits=logits, past_key_values=cache)

    def _logits(self, ids):
        found = self.script(ids)
        if isinstance(found, torch.Tensor):
            return found
        logits = torch.full((VOCABULARY,), -30.0)
        logits[found] = 30.0
        return logits


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


class SmallModel(ScriptedModel):
    """A scripted model whose memory holds so many tokens."""

    def __init__(self, script, held, error=OUT_OF_MEMORY):
        super().__init__(script)
        self.held, self.error = held, error

    def forward(self, input_ids, past_key_values=None, logits_to_keep=0, **options):
        read = 0 if past_key_values is None else past_key_values.ids.shape[1]
        if read + input_ids.shape[1] > self.held:
            raise self.error
        return super().forward(input_ids, past_key_values, logits_to_keep=logits_to_keep, **options)


def no_memory(*args, **options):
    """Run out of memory, in place of a function that a test patches."""
    raise OUT_OF_MEMORY


def answering(tokenizer, answer):
    """Return a script that writes `answer(prompt text)` after a question, then ends."""

    def script(ids):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        start = text.rfind("\n") + 1
        asked = QUESTION.search(text, start)
        if asked is None:
            return ord(" ")
        prompt, written = text[: asked.end()], text[asked.end() :]
        reply = " " + answer(prompt)
        if not reply.startswith(written) or reply == written:
            return EOS
        return tokenizer(reply[len(written)], add_special_tokens=False)["input_ids"][0]

    return script
