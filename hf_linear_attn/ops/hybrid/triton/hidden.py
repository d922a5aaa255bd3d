"""The kernel that computes what the hidden units of a learned rule are given of a key that leaves the window.

That are 4 HKV vectors: the key and the value of each key head at its token, and their means over the next tokens. A
program takes BD entries of one of them, of BT rows, and the weights ``[BD, BU]`` by which they enter the units of one
key head. The trade adds up what all of them give. So weights are read once for BT rows, and of a single row by 4 HKV^2
programs and more.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.hybrid.records import HybridStep, KeptStep
from hf_linear_attn.ops.hybrid.triton.step import of_rows, stand
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded, precision
from hf_linear_attn.ops.triton.primitives import exact, load_turned

TILE = 16
"""Rows of a program: as few as products take."""
WIDEST = 128
"""Entries of a vector that a program takes at most: of twice as many, products would not fit into registers."""


@triton.jit
def load_said(
    near, at, token, at_token, near_turns, turn, turns, turn_token, near_mask,
    i_b, new, old, read, enters, means, N, W, od,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, A: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, AT_END: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Load what slots say of the keys that leave: a head's vectors, or the means of those of the A tokens behind each.

    The vectors of a row's slots begin at ``near + at``, and their angles, S apart, at ``near_turns + turn``.
    """
    EXACT: tl.constexpr = D % BD == 0
    if means:
        x = tl.zeros([i_b.shape[0], BD], tl.float32)
        for j in range(1, A + 1):
            slot = N + (old - N + j) % (W + 1)
            if POOL:
                came = read - 1 - (read - 1 - (slot - N) + (W + 1)) % (W + 1)
                shows = (came >= N) & (came >= read - W)
            else:
                shows = tl.load(near_mask + i_b * (N + W + 1) + slot) != 0
            place, angles = at + slot * D, turn + slot * S
            shows = shows & (slot != new)
            y = load_turned(near, place, near_turns, angles, od, shows, D, R, PAIRS, AT_END, EXACT, "ieee")
            x += y.to(tl.float32)
        # The step writes the new token into its slot while others may still read.
        shows = enters & ((new - old + W + 1) % (W + 1) <= A)
        y = load_turned(token, at_token, turns, turn_token, od, shows, D, R, PAIRS, AT_END, EXACT, "ieee")
        x = (x + y.to(tl.float32)) / A
    else:
        place, angles = at + old * D, turn + old * S
        x = load_turned(near, place, near_turns, angles, od, read >= 0, D, R, PAIRS, AT_END, EXACT, "ieee")
        x = x.to(tl.float32)
    return x


@triton.jit(do_not_specialize=["length", "B", "N", "W", "m_b", "t_b"])
def hidden_kernel(
    k, v, key_mask, seen, length, rows, near_k, near_v, near_mask, near_turns, turns,
    mean, deviation, weight_in, hidden,
    B, HKV, N, W, k_b, k_h, v_b, v_h, m_b, t_b, nk_p, nv_p, nt_p,
    D: tl.constexpr, V: tl.constexpr, U: tl.constexpr, A: tl.constexpr,
    BD: tl.constexpr, BU: tl.constexpr, BT: tl.constexpr, NC: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    MASKED: tl.constexpr, STATIC: tl.constexpr, POOL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what entries of one vector give one key head's hidden units, of some rows."""
    pid = tl.program_id(0)
    i_hk = pid % HKV
    part = (pid // HKV) % (4 * HKV * NC)
    row = (pid // (4 * HKV * NC * HKV)) * BT + tl.arange(0, BT)
    # Behind the last row that one is read again.
    i_b = tl.minimum(row, B - 1).to(tl.int64)
    od = part % NC * BD + tl.arange(0, BD)
    ou = tl.arange(0, BU)
    slots = N + W + 1
    i_p, new, old, read, real = stand(rows, length, seen, key_mask, i_b, m_b, N, W, MASKED, STATIC, POOL)
    # One for each row, even where it is the same.
    new += 0 * i_b
    old += 0 * i_b
    enters = real & (read >= N)
    # All keys and values of a token, and then all means.
    vector = part // NC
    h = vector // 2 % HKV
    means = vector >= 2 * HKV
    first = means.to(tl.int32) * (HKV * (D + V)) + h * (D + V)
    columns = D
    if vector % 2 == 0:
        x = load_said(
            near_k + h * slots * D, i_p * nk_p, k + h * k_h, i_b * k_b,
            near_turns, i_p * nt_p, turns, i_b * t_b, near_mask, i_b, new, old, read, enters, means, N, W, od,
            D, BD, D, A, R, PAIRS, AT_END, POOL,
        )  # fmt: skip
    else:
        first += D
        columns = V
        x = load_said(
            near_v + h * slots * V, i_p * nv_p, v + h * v_h, i_b * v_b,
            near_turns, i_p * nt_p, turns, i_b * t_b, near_mask, i_b, new, old, read, enters, means, N, W, od,
            V, BD, D, A, 0, PAIRS, AT_END, POOL,
        )  # fmt: skip
    usual = tl.load(mean + first + od, mask=od < columns, other=0.0).to(tl.float32)
    spread = tl.load(deviation + first + od, mask=od < columns, other=1.0).to(tl.float32)
    x = tl.where((od < columns)[None, :], (x - usual[None, :]) / spread[None, :], 0.0)
    # [BD, BU]
    weight = weight_in + (i_hk * (2 * HKV * (D + V)) + first + od)[:, None] * U + ou[None, :]
    weight = tl.load(weight, mask=(od < columns)[:, None] & (ou < U)[None, :], other=0.0).to(tl.float32)
    given = hidden + ((row.to(tl.int64) * HKV + i_hk) * (4 * HKV * NC) + part)[:, None] * U + ou[None, :]
    tl.store(given, exact(x, weight, PRECISION), mask=(row < B)[:, None] & (ou < U)[None, :])


def hidden_launch(target: Target, step: HybridStep, kept: KeptStep) -> tuple[Tensor, Launch]:
    """Plan what comes before the trade of a learned rule, as :func:`hybrid_launches` does.

    Args:
        target: The device.
        step: The step.
        kept: Its kept keys, which have scores.

    Returns:
        What entries of each vector give the hidden units ``[B, HKV, parts, U]`` fp32, allocated, and the launch.
    """
    (B, HKV, _, D), V, slots = step.k.shape, step.v.shape[3], step.near_k.shape[2]
    mean, deviation, weight_in, *_ = kept.weights
    U = weight_in.shape[2]
    width = min(padded(max(D, V)), WIDEST)
    pieces = -(-max(D, V) // width)
    parts = 4 * HKV * pieces
    hidden = torch.empty(B, HKV, parts, U, dtype=torch.float32, device=step.k.device)
    names = ("k", "v", "key_mask", "seen", "rows", "near_k", "near_v", "near_mask", "near_turns", "turns")
    tensors = {name: getattr(step, name) for name in names}
    tensors |= {"mean": mean, "deviation": deviation, "weight_in": weight_in}
    chosen = Tile(TILE, width, 4, 1)
    arguments = {
        **tensors,
        **{"length": step.length if step.place is None else step.place, "hidden": hidden},
        **{"B": B, "HKV": HKV, "N": step.sinks, "W": slots - step.sinks - 1},
        **{f"{name}_{dim}": x.stride(n) for name, x in (("k", step.k), ("v", step.v)) for n, dim in enumerate("bh")},
        "m_b": 0 if step.key_mask is None else step.key_mask.stride(0),
        "t_b": 0 if step.turns is None or len(step.turns) == 1 else step.turns.stride(0),
        **{"nk_p": of_rows(step.near_k), "nv_p": of_rows(step.near_v), "nt_p": of_rows(step.near_turns)},
        **{"D": D, "V": V, "U": U, "A": kept.ahead, "BD": width, "BU": padded(U), "BT": TILE, "NC": pieces},
        **{"R": 0 if step.turns is None else step.turns.shape[2], "PAIRS": step.pairs, "AT_END": step.at_end},
        **{"MASKED": step.key_mask is not None, "STATIC": step.place is not None, "POOL": step.rows is not None},
        "PRECISION": precision(target, torch.float32, width),
    }
    reads = tuple(x for x in tensors.values() if x is not None)
    programs = -(-B // TILE) * parts * HKV
    return hidden, Launch("hidden", hidden_kernel, programs, arguments, chosen, reads, (hidden,))
