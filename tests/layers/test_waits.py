"""What a layer waits for: on a GPU every question about a tensor's numbers stops the host."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attn.layers import State
from tests.ops.test_hybrid_step import Case, read


class Questions(TorchDispatchMode):
    """Counts the numbers that the host asks for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("static", [False, True])
def test_a_layer_with_kernels_asks_nothing_of_texts_without_padding(static: bool) -> None:
    case = Case("norm_preserving", B=1, H=1, HKV=1, window=2, sinks=2, T=6, turned=16, static=static)
    layer, state = case.layer("triton"), State(static=static)
    with Questions() as questions:
        for start, end in ((0, 1), (1, 5), (5, 6)):
            read(layer, case, state, start, end)
    assert state.tensors["seen"] == case.T
    assert questions.count == 0
    assert static or state.first_read


def test_a_second_layer_numbers_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on lengths alone is made once for all layers, and right for texts of other lengths."""
    made, arange = [], torch.arange
    monkeypatch.setattr(torch, "arange", lambda *given, **named: made.append(given) or arange(*given, **named))
    counts = []
    for length in (46, 46, 45, 46):
        case = Case("norm_preserving", B=1, H=1, HKV=1, window=2, sinks=2, T=length, turned=16)
        made.clear()
        found = read(case.layer("triton"), case, State(), 0, length)
        counts.append(len(made))
        torch.testing.assert_close(found, read(case.layer("torch"), case, State(), 0, length), atol=1e-4, rtol=1e-4)
    assert [count > 0 for count in counts] == [True, False, True, False]
