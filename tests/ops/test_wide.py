"""Heads of more than 128 dimensions and the features that a paired map makes of them: no program holds them whole."""

import warnings
from itertools import product

import pytest
import torch
from torch import Tensor

from hf_linear_attn import linear_attention
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.ops import dispatch
from hf_linear_attn.ops.features import features_of
from tests.ops.oracle import DEVICE, assert_near, poison
from tests.spread import spread

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""By norm: of dq, a difference of sums, 5e-4 and 1.8e-2, as of 256 features in one program; half of the rest."""
CASES = {
    "plain": {},
    "masked, delayed": {"key_mask": True, "delay": 5},
    "faded": {"log_decay": True},
    "both ways": {"causal": False},
    "packed": {"cu_seqlens": (0, 3, 3, 40), "key_mask": True},
}


def attend(F: int, V: int, T: int, dtype: torch.dtype, backend: str, **settings: object) -> list[Tensor]:
    """Return outputs, the state and gradients of positive features; the reference's of the same numbers in fp64."""
    g = torch.Generator(DEVICE).manual_seed(1)
    sizes = (2, F), (1, F), (1, V)
    q, k, v = (torch.rand(1, heads, T, n, generator=g).to(dtype) for heads, n in sizes)
    given, leaves = dict(settings), [q, k, v - 0.5]
    if "cu_seqlens" in given:
        given["cu_seqlens"] = torch.tensor(given["cu_seqlens"])
    if "key_mask" in given:
        given["key_mask"] = torch.rand(1, T, generator=g) > 0.2
    if "log_decay" in given:
        leaves.append(-0.2 * torch.rand(1, 1, T, generator=g))
    wide = torch.float64 if backend == "reference" else None
    leaves = [x.to(wide).detach().requires_grad_() for x in leaves]
    if "log_decay" in given:
        given["log_decay"] = leaves[3]
    o, state = linear_attention(*leaves[:3], None, backend=backend, **given)
    probes = (torch.randn(x.shape, generator=g).to(x) for x in (o, state.kv, state.z))
    loss = sum((x * y).sum() for x, y in zip((o, *state), probes, strict=True))
    return [*(x.detach() for x in (o, *state)), *torch.autograd.grad(loss, leaves)]


def assert_like_the_reference(F: int, V: int, T: int, dtype: torch.dtype, **settings: object) -> None:
    found, wanted = (attend(F, V, T, dtype, backend, **settings) for backend in ("triton", "reference"))
    for name, x, y in zip(("o", "kv", "z", "dq", "dk", "dv", "dlog_decay"), found, wanted, strict=False):
        assert_near(x, y, TOLERANCE[dtype], name, least=0)


def test_features_that_no_program_holds_whole() -> None:
    """Of 272 features three tiles of 128, of which the last is not full."""
    assert_like_the_reference(272, 16, 20, torch.float16, key_mask=True, delay=3)


@pytest.mark.parametrize(
    ("case", "dtype"), spread(product(("plain", "masked, delayed", "faded", "packed"), TOLERANCE), 5), ids=str
)
def test_keys_and_values_of_programs_side_by_side(
    case: str, dtype: torch.dtype, stored_states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 128 features no program holds the gradients of both."""
    poison(monkeypatch)
    assert_like_the_reference(144, 72, 40, dtype, **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("F", "V", "dtype"), [(384, 192, torch.float16), (512, 256, torch.bfloat16)], ids=str)
def test_features_of_wide_heads(F: int, V: int, dtype: torch.dtype, case: str) -> None:
    assert_like_the_reference(F, V, 40, dtype, **CASES[case])


def test_a_map_that_no_kernel_holds_says_so_once() -> None:
    """Features used to be PyTorch's without a word."""
    dispatch._warn_once.cache_clear()
    feature_map = get_feature_map("hedgehog", 320).to(DEVICE)
    x = torch.randn(1, 1, 3, 320)
    with pytest.warns(RuntimeWarning, match="weights have size 320, and the kernels hold at most 256: PyTorch's"):
        features_of(feature_map, x, "q", backend="triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features_of(feature_map, x, "q", backend="triton")
