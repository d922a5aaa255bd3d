import random

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.data import Blocking, Data, Document, DocumentBlocks, RecallRows
from hf_linear_attn.evaluation.tasks.base import bos_ids
from tests.distill.tiny import byte_tokenizer, tiny_teacher


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    return tiny_teacher()


@pytest.fixture
def data(tokenizer) -> tuple[Data, Data]:
    rng = random.Random(0)
    documents = [Document([rng.randrange(3, 250) for _ in range(rng.randrange(20, 90))]) for _ in range(40)]
    made = [
        Data(
            DocumentBlocks(documents[part], Blocking(bos_ids(tokenizer), 16), seed=0),
            RecallRows(tokenizer, seed=0),
            recall_share=0.25,
            answer_weight=4.0,
            pad=0,
        )
        for part in (slice(0, 35), slice(35, 40))
    ]
    return made[0], made[1]


@pytest.fixture
def settings() -> DistillationSettings:
    return DistillationSettings(
        window=4,
        sinks=1,
        block_tokens=16,
        rows=2,
        transfer_steps=3,
        distill_steps=4,
        distill_lr=1e-3,
        heldout_rows=0,
        log_every=1,
        checkpoint_every=2,
        progress=False,
    )


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
