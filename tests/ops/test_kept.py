"""Which keys are kept beyond a window: loop and kernel choose as PyTorch does, which is held to the definition."""

import pytest
import torch

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.kept import AGES, Choice, Entering, choose_kept
from tests.ops.oracle import DEVICE

B, HKV, V, W = 2, 2, 6, 4


def entering(
    keys: int, tokens: int, scores: bool, dtype: torch.dtype, *, alike: bool = False, seed: int = 0
) -> Entering:
    """Return keys that leave a window: in one row hardly any before these, in the other more than are kept."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    compared = torch.randn(B, HKV, keys + tokens, AGES if scores else V, generator=g).to(dtype)
    if alike:
        # As a text has it that says one thing again and again, near enough to be alike but for scores.
        noise = 1 + 1e-3 * torch.randn(compared[:, :, 1::2].shape, generator=g)
        compared[:, :, 1::2] = compared[:, :, :1] * noise.to(dtype)
    enters = torch.rand(B, tokens, generator=g) < 0.8
    number = torch.tensor([min(1, keys - 1), keys + 3])
    positions = enters.long().cumsum(1) + number[:, None] + keys
    at = torch.stack([torch.randperm(keys, generator=g) for _ in range(B * HKV)]).view(B, HKV, keys)
    nearest = torch.rand(B, HKV, 0 if scores else keys, generator=g)
    return Entering(compared, enters, positions, number, nearest, at, W if scores else 0)


def same(found: Choice, expected: Choice) -> None:
    for name, x, y in zip(Choice._fields, found, expected, strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", ["numba", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [False, True], ids=["by redundancy", "by scores"])
@pytest.mark.parametrize(("keys", "tokens", "alike"), [(1, 1, False), (3, 1, False), (3, 20, True), (8, 20, False)])
def test_backends_choose_alike(keys, tokens, alike, scores, dtype, backend):
    call = entering(keys, tokens, scores, dtype, alike=alike)
    same(choose_kept(call, backend), choose_kept(call, "torch"))


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_scores_stay_as_they_are_from_the_last_age_on(backend):
    call = entering(8, 200, True, torch.float32)
    # With a window of 1 the last age is 32, and keys enter six tokens apart; some have numbers that are yet to come.
    call = call._replace(window=1, positions=6 * call.positions - 600)
    same(choose_kept(call, backend), choose_kept(call, "torch"))


@pytest.mark.parametrize("scores", [False, True], ids=["by redundancy", "by scores"])
def test_a_default_device_is_not_where_the_loop_works(scores):
    call = entering(3, 20, scores, torch.float32)
    expected = choose_kept(call, "torch")
    with torch.device("meta"):
        found = choose_kept(call, "numba")
    same(found, expected)


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_small_values_that_come_after_large_ones_are_told_apart(backend):
    call = entering(3, 20, False, torch.float32)
    # How alike two are is told beside their own lengths, not those of what lay in their places before.
    call.compared[:, :, 3:] *= 1e-2
    same(choose_kept(call, backend), choose_kept(call, "torch"))


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_pieces_choose_as_the_whole(backend):
    call = entering(3, 12, False, torch.float32)
    whole = choose_kept(call, backend)
    first = call._replace(compared=call.compared[:, :, :8], enters=call.enters[:, :5], positions=call.positions[:, :5])
    before = choose_kept(first, backend)
    held = first.compared.gather(2, before.held[..., None].expand(-1, -1, -1, V))
    rest = Entering(
        torch.cat([held, call.compared[:, :, 8:]], 2),
        call.enters[:, 5:],
        call.positions[:, 5:],
        call.number + first.enters.sum(1),
        before.nearest,
        before.at,
    )
    after = choose_kept(rest, backend)
    assert torch.equal(torch.cat([before.slot, after.slot], 2), whole.slot)
    assert torch.equal(after.at, whole.at)
    torch.testing.assert_close(after.nearest, whole.nearest)


def test_what_the_kernel_cannot_hold_is_refused_by_name():
    with pytest.raises(BackendError, match="cannot hold 8192 of a head, of which 6 numbers each are compared"):
        choose_kept(entering(8192, 1, True, torch.float32), "triton")
    with pytest.raises(BackendError, match="not float64"):
        choose_kept(entering(2, 1, True, torch.float64), "triton")
