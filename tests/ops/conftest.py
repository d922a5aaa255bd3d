"""Fixtures for the attention op's tests."""

from collections.abc import Iterator

import pytest
import torch

from hf_linear_attn.ops.linear_attention import torch as chunked
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


def target(processors: int) -> plan.Target:
    """Return a device like the one at hand with so many processors."""
    found = plan.target_of(DEVICE)
    assert found is not None, f"no kernels for {DEVICE}"
    return found._replace(processors=processors)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sequences be cut into segments of 16 tokens or a tile, as if the device had room for many programs."""
    monkeypatch.setattr(plan, "SHORTEST_SEGMENT", dict.fromkeys(plan.SHORTEST_SEGMENT, 16))
    many = target(64)
    monkeypatch.setattr("hf_linear_attn.ops.triton.run.target_of", lambda device: many)


@pytest.fixture
def few_processors(short_segments: None, monkeypatch: pytest.MonkeyPatch) -> plan.Target:
    """Leave so few processors that dq, with a program per tile of D, fills them with fewer segments."""
    few = target(16)
    monkeypatch.setattr("hf_linear_attn.ops.triton.run.target_of", lambda device: few)
    return few


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the PyTorch backend walk chunks of 16 tokens, so that small problems have several."""
    monkeypatch.setattr(chunked, "CHUNK", 16)
