"""Fixtures for the attention op's tests."""

from collections.abc import Iterator

import pytest
import torch

from hf_linear_attn.ops.linear_attention import torch as chunked
from hf_linear_attn.ops.linear_attention.triton import model
from hf_linear_attn.ops.triton import plan, remember
from tests.ops.oracle import DEVICE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run each test on one thread: the problems are far too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Make tensors where the kernels run."""
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Forget plans around each test: many change what plans depend on."""
    remember.forget()
    yield
    remember.forget()


TILE, STORED_TILE = (16, 16) if DEVICE.type == "cpu" else (64, 128)
"""Tokens of the largest tiles."""


def cut_as(monkeypatch: pytest.MonkeyPatch, stored: bool, length: int | None) -> None:
    """Leave the model no choice; a length of None is whole sequences. Not every dtype has walks that read states."""

    def only(p: plan.Problem, tokens: int, role: str) -> Iterator[model.Cut]:
        yield model.Cut(stored and p.causal and p.has("stored_" + role), tokens if length is None else length)

    monkeypatch.setattr(model, "cuts", only)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sequences into segments of a tile, whose states are carried."""
    cut_as(monkeypatch, stored=False, length=TILE)


@pytest.fixture
def stored_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sequences into segments of two tiles, whose states are read."""
    cut_as(monkeypatch, stored=True, length=2 * STORED_TILE)


@pytest.fixture
def whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carry the state of each sequence from its beginning to its end."""
    cut_as(monkeypatch, stored=False, length=None)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the PyTorch backend walk chunks of 16 tokens, so that small problems have several."""
    monkeypatch.setattr(chunked, "CHUNK", 16)
