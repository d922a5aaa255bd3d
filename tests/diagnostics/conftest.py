import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.evaluation.helpers import SYMBOLS, byte_level, tiny_llama


@pytest.fixture
def llama() -> LlamaForCausalLM:
    """A Llama of two layers and four heads, over bytes."""
    sizes = {"vocab_size": 256, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_llama(**sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.3)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    return byte_level({symbol: i for i, symbol in enumerate(SYMBOLS)})
