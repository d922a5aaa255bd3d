import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.evaluation.helpers import SYMBOLS, byte_level


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    return byte_level({symbol: i for i, symbol in enumerate(SYMBOLS)})
