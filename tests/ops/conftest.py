"""Fixtures for the attention op's tests."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attn.ops.linear_attention import torch as chunked
from hf_linear_attn.ops.linear_attention.triton import model
from hf_linear_attn.ops.triton import plan, run
from tests.ops.oracle import DEVICE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run each test on one thread: the problems are far too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make tensors where the kernels run; where that is a GPU, loops, which read what lies on a CPU, are not tested."""
    given = getattr(request.node, "callspec", None)
    if DEVICE.type != "cpu" and ("test_loops" in request.node.nodeid or (given and "numba" in given.params.values())):
        pytest.skip("loops run on a CPU")
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


class OnlyAllocates(TorchDispatchMode):
    """Refuses what a plan must not do: on the meta device nothing is computed, and a plan would leave it out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "empty" in str(func) or func.is_view, f"a plan computes {func}"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans anew in each test, since many change what plans depend on; hold that they only allocate."""
    make = run.plan_of.__wrapped__

    @lru_cache(**run.plan_of.cache_parameters())
    def plan_of(*arguments: Any) -> Any:
        with OnlyAllocates():
            return make(*arguments)

    monkeypatch.setattr(run, "plan_of", plan_of)


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
def apart(whole_sequences: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no kernel read a text in one, as on most GPUs: features, linear branch and window have one each."""
    has = plan.Problem.has
    fused = "prefill", "queries_backward"
    monkeypatch.setattr(plan.Problem, "has", lambda p, role: role not in fused and has(p, role))


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the PyTorch backend walk chunks of 16 tokens, so that small problems have several."""
    monkeypatch.setattr(chunked, "CHUNK", 16)
