"""Transformers' own tests of its models, on patched ones: `make transformers-tests`.

They come with the source of the pinned version, which that command puts into `build/`; nothing of it is kept here. The
source has no files of the two mixins beside this one, of generation and of exports.
"""

import functools
import importlib
import sys
import unittest
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, CheckpointError, UnsupportedError
from hf_linear_attn.patching.convert import linear_attention_class

from .zoo import VOCAB, tiny_config

FOLDER = Path(__file__).parents[2] / f"build/transformers-{transformers.__version__}/tests"
pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("default")]
if not FOLDER.exists():
    pytest.skip("`make transformers-tests` fetches Transformers' own tests", allow_module_level=True)
pytest.importorskip("parameterized", reason="`make transformers-tests` installs what Transformers' own tests need")

MODELS = {
    "llama": "LlamaModel LlamaForCausalLM LlamaForTokenClassification",
    "gpt2": "GPT2Model GPT2LMHeadModel GPT2ForSequenceClassification",
    "gemma3_text": "Gemma3TextModel Gemma3ForCausalLM",
    "qwen3": "Qwen3Model Qwen3ForCausalLM",
    "mistral": "MistralModel MistralForCausalLM",
    "mixtral": "MixtralModel MixtralForCausalLM",
    "gpt_neox": "GPTNeoXModel GPTNeoXForCausalLM",
    "bert": "BertModel BertForMaskedLM BertForMultipleChoice",
    "bart": "BartModel BartForConditionalGeneration",
    "whisper": "WhisperModel WhisperForConditionalGeneration",
}
SEE_BOTH_WAYS = ("bert", "bart", "whisper")
REFUSED = [
    (
        UnsupportedError,
        "`output_attentions` must be False",
        "linear attention has no attention maps",
        "attention_outputs capture_outputs_decorator model_outputs_equivalence retain_grad_hidden_states_attentions "
        "sliding_window_mask eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions",
    ),
    (
        CheckpointError,
        "hold the tensors of every patched layer",
        "a checkpoint without the tensors of converted layers is refused, none of them is drawn",
        "base_model_prefix_loads_base_weights model_weights_reload_no_missing_tied_weights "
        "can_init_all_missing_weights",
    ),
    (
        AssertionError,
        "`format_version` in module `LinearAttention`",
        "format_version is read from a checkpoint, and never set anew",
        "init_weights_can_init_buffers",
    ),
    (
        AssertionError,
        "False is not true",
        "attn_implementation does not choose how converted layers attend",
        "can_set_attention_dynamically sdpa_can_dispatch_non_composite_models",
    ),
    (
        AssertionError,
        "GenerationTesterMixin",
        "the mixin of generation is not in Transformers' source",
        "generation_tester_mixin_inheritance",
    ),
]
"""What tests of which names end with: an error, what it says, and the reason."""


class NoMarks:
    """In the place of `pytest.mark`: theirs are registered in a configuration of their own."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: args[0] if args else lambda test: test


def transformers_mixin() -> Any:
    """Import the mixin, with empty ones in the place of those that it lacks."""
    package = "transformers_own"
    for name, members in {
        package: {"__path__": [str(FOLDER)]},
        f"{package}.exporters": {"__path__": []},
        f"{package}.exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
        f"{package}.generation": {"__path__": []},
        f"{package}.generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    }.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(members)
    with mock.patch.object(pytest, "mark", NoMarks()):
        return importlib.import_module(f"{package}.test_modeling_common").ModelTesterMixin


class Built:
    """What the tests ask for: a configuration, its sizes, and inputs."""

    batch_size, seq_length, is_training, num_choices = 3, 10, True, 2

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        config = self.get_config()
        self.num_hidden_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.encoder_seq_length = getattr(config, "max_source_positions", self.seq_length)

    def get_config(self) -> PreTrainedConfig:
        config = tiny_config(self.model_type)
        if self.model_type == "whisper":
            config.max_source_positions = 20
        if self.model_type == "gpt_neox":
            # A quarter of a head is rotated, and two dimensions are too few for some rotations.
            config.num_attention_heads = 2
        if self.model_type in ("mistral", "mixtral"):
            # Layers that are a window already stay as they are.
            config.sliding_window = None
        window = {} if self.model_type in SEE_BOTH_WAYS else {"window": 4, "sinks": 1}
        config.linear_attention = LinearAttentionConfig(feature_map="hedgehog", **window).to_dict()
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        ids = torch.randint(5, VOCAB, (self.batch_size, self.seq_length))
        config, inputs = self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.model_type == "whisper":
            inputs = {
                "input_features": torch.randn(self.batch_size, config.num_mel_bins, 2 * config.max_source_positions)
            }
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        return config, inputs


def refused(test: Callable[[Any], None], kind: type[Exception], said: str, reason: str) -> Callable[[Any], None]:
    """Return a test that is skipped with the reason where it ends with such an error."""

    @functools.wraps(test)
    def run(self: Any) -> None:
        # A part that fails would not end the test.
        self.subTest = lambda *_, **__: nullcontext()
        try:
            test(self)
        except kind as error:
            if said not in str(error):
                raise
            self.skipTest(f"refused: {reason}")

    return run


def made_of(mixin: Any, model_type: str, names: list[str]) -> type:
    """Make the tests of an architecture."""

    def set_up(self: Any) -> None:
        self.model_tester = Built(model_type)

    def prepare(self: Any, inputs: dict[str, Any], cls: type, return_labels: bool = False) -> dict[str, Any]:
        inputs = mixin._prepare_for_class(self, inputs, cls, return_labels)
        if return_labels and cls.__name__ == "WhisperForConditionalGeneration":
            inputs["labels"] = inputs["decoder_input_ids"]
        return inputs

    members: dict[str, Any] = {
        "all_model_classes": tuple(linear_attention_class(getattr(transformers, name)) for name in names),
        "is_encoder_decoder": model_type in ("bart", "whisper"),
        "setUp": set_up,
        "_prepare_for_class": prepare,
        # It counts on words going in.
        "test_resize_embeddings": model_type != "whisper",
        "__module__": __name__,
    }
    for kind, said, reason, tests in REFUSED:
        for name in (f"test_{test}" for test in tests.split()):
            members[name] = refused(getattr(mixin, name), kind, said, reason)
    if model_type in ("mistral", "mixtral"):
        # These give every layer a window of its own, which then stays as it is.
        for name in (name for name in dir(mixin) if name.startswith("test_eager_matches_sdpa_inference_")):
            reason = "layers that are a window already are not converted"
            members[name] = refused(getattr(mixin, name), ArgumentError, "`layers` must choose at least", reason)
    return type(f"Test{names[0].removesuffix('Model')}", (mixin, unittest.TestCase), members)


for _type, _names in MODELS.items():
    _tests = made_of(transformers_mixin(), _type, _names.split())
    globals()[_tests.__name__] = _tests
del _tests
