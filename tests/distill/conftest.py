import pytest
import torch
from transformers import LlamaForCausalLM

from hf_linear_attn.distill import Data, DistillationSettings
from tests.distill.tiny import byte_tokenizer, tiny_data, tiny_settings, tiny_teacher


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    return tiny_teacher()


@pytest.fixture
def data() -> tuple[Data, Data]:
    return tiny_data(slice(0, 35)), tiny_data(slice(35, 40))


@pytest.fixture
def settings() -> DistillationSettings:
    return tiny_settings(transfer_steps=3, distill_steps=4, distill_lr=1e-3, checkpoint_every=2)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
