"""Queries and keys turned back by a Triton kernel, for whatever does not turn them as it loads them."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.library import operator, refuse_functional, refuse_vmap
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded, planned, readable
from hf_linear_attn.ops.triton.primitives import load_plain, store_tile
from hf_linear_attn.ops.triton.run import directly, execute, target_for

TILE = 4096
"""Entries that a program turns."""


@triton.jit(do_not_specialize=["T", "heads"])
def turn_kernel(
    x, turns, o,
    T, heads, x_b, x_h, x_t, o_b, o_h, o_t, t_b,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr, DERIVE: tl.constexpr,
):  # fmt: skip
    """Turn BT tokens of one head back, or derive that; heads of the same tokens come together and share angles."""
    pid = tl.program_id(0)
    i_h = (pid % heads).to(tl.int64)
    c = (pid // heads % tl.cdiv(T, BT)).to(tl.int64) * BT
    i_b = (pid // heads // tl.cdiv(T, BT)).to(tl.int64)
    od = tl.arange(0, BD)
    ot = tl.arange(0, BT)
    rows = ot < (T - c).to(tl.int32)
    x += i_b * x_b + i_h * x_h + c * x_t
    o += i_b * o_b + i_h * o_h + c * o_t
    turns += i_b * t_b + c * R
    y = load_plain(x, x_t, turns, ot, od, rows, D, R, PAIRS, AT_END, D == BD, "ieee", DERIVE)
    store_tile(o, ot[:, None] * o_t + od[None, :], y, rows, od < D, D == BD)


def turn_launch(
    target: Target, x: Tensor, turns: Tensor, pairs: str, at_end: bool, derive: bool
) -> tuple[Tensor, Launch]:
    """Plan the kernel; return the result, allocated, and the launch.

    Args:
        target: The device.
        x: Queries or keys as kernels read them ``[B, heads, T, D]``.
        turns: Cosines and then sines ``[B or 1, T, R]``, contiguous; see :class:`Rotation`.
        pairs: Which entries are turned together, ``"half"`` or ``"next"``.
        at_end: Whether the last R entries are turned, rather than the first.
        derive: Whether ``x`` is a gradient of what was turned back.
    """
    B, heads, T, D = x.shape
    o = empty_like_tokens(x, D)
    chosen = Tile(max(16, TILE // padded(D)), padded(D), 4, 1)
    known = {
        **{"x": x, "turns": turns, "o": o, "T": T, "heads": heads},
        "t_b": 0 if len(turns) == 1 else turns.stride(0),
        **{"D": D, "BD": padded(D), "BT": chosen.tokens},
        **{"R": turns.shape[2], "PAIRS": pairs, "AT_END": at_end, "DERIVE": derive},
    }
    return o, planned("turn", turn_kernel, B * heads * -(-T // chosen.tokens), known, chosen, (x, turns), (o,))


def _turn(x: Tensor, turns: Tensor, pairs: str, at_end: bool, derive: bool) -> Tensor:
    """Turn queries or keys back, or derive that."""
    return execute(turn_launch, target_for(x.device), readable(x), turns.contiguous(), pairs, at_end, derive)


triton_turn = operator("triton_turn", _turn, lambda x, *others: empty_like_tokens(readable(x), x.shape[3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, turns, *ctx.settings = inputs
    ctx.save_for_backward(turns)


def _backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    pairs, at_end, derive = ctx.settings
    # A linear map: what derives its derivative is itself.
    return turn(do, ctx.saved_tensors[0], pairs, at_end, not derive), None, None, None, None


torch.library.register_autograd(triton_turn, _backward, setup_context=_save)
refuse_vmap("triton", triton_turn)
_compute = directly(triton_turn, _turn, _save, _backward)


def turn(x: Tensor, turns: Tensor, pairs: str, at_end: bool, derive: bool) -> Tensor:
    """Turn queries or keys ``[B, H, T, D]`` back, or derive that; arguments as of :func:`turn_launch`."""
    refuse_functional("triton", x)
    o: Tensor = _compute(x, turns, pairs, at_end, derive)
    return o
