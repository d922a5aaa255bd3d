"""Log decays: the kernel that sums them up, so that a walk knows what lies between two tokens, and their gradient.

Row t of a walk meets the key that lags by the delay, and its log decay; masked keys fade nothing. Sums run from each
segment's start, are to base 2, and are added up in fp64: what is kept of them are two numbers of fp32.

A log decay scales what queries from its row on draw from keys before it. With U_j = phi_k . dphi_k, what all queries
draw from key j, and T_i = phi_q . dphi_q, what query i draws from all keys, the gradient of a segment's first one is
``S . R``, of the state before it and that state's gradient, and with every row it grows by ``U - T``. Each segment
begins anew, and each reset, whose own gradient is 0, so that rounding does not add up over a sequence. Outputs are
divided by the sum of their weights, so that T is nearly 0; but what was rounded in U is rounded in T, and is gone from
their difference.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.linear_attention.triton.steps import whole_z
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, Tile, padded, planned
from hf_linear_attn.ops.triton.primitives import (
    in_two,
    key_rows,
    keys_of,
    log2_decay,
    mask_of,
    phi,
    resets,
    rows_before,
    segment_bounds,
    sum_anew,
)

TILE = Tile(256, 1, 4, 1)
"""The same for every size: it reads one number per token and key head."""


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "m_b"])
def fade_kernel(
    g, mask, b, totals, table,
    T, L, NSEG, delay, HKV,
    g_b, g_h, g_t, m_b,
    BT: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
):  # fmt: skip
    """Write the sums of one segment's log decays up to each of its rows, and up to its end."""
    pid = tl.program_id(0)
    i_hk = (pid % HKV).to(tl.int64)
    i_s = pid // HKV
    _n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    ot = tl.arange(0, BT)
    g = keys_of(g, row, i_hk, g_b, g_h, g_t, delay, DELAYED)
    b += (row * HKV + i_hk) * 2 * T
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    total = tl.zeros([], tl.float64)
    for c in range(start, end, BT):
        rows = rows_before(end, c, ot)
        _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        x = log2_decay(tl.load(g + (c + ot) * g_t, mask=counts, other=0.0)).to(tl.float64)
        high, low = in_two(total + tl.cumsum(x, 0))
        tl.store(b + c + ot, high, mask=rows)
        tl.store(b + T + c + ot, low, mask=rows)
        total += tl.sum(x, 0)
    tl.store(totals + i_s * HKV + i_hk, total.to(tl.float32))


@triton.jit
def products(x, acc, columns, MAP: tl.constexpr):
    """Return ``phi(x) . acc`` row by row, in the columns that there are."""
    y = phi(x, MAP).to(x.dtype).to(tl.float32)
    return tl.sum(tl.where(columns[None, :], y * acc, 0.0), 1)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "m_b"])
def fade_back_kernel(
    g, drawn, asked, mask, dg, kv0, z0, dkv0, dz0, starts, start_parts, ends, end_parts, table,
    T, L, NSEG, delay, HKV,
    g_b, g_h, g_t, dg_b, dg_h, dg_t, m_b,
    D: tl.constexpr, V: tl.constexpr, OF_K: tl.constexpr, OF_Q: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BT: tl.constexpr, STARTS: tl.constexpr, INITIAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one segment's log decays."""
    pid = tl.program_id(0)
    i_hk = (pid % HKV).to(tl.int64)
    i_s = (pid // HKV).to(tl.int64)
    n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    if start >= end:
        return
    oe = tl.arange(0, BE)
    od = tl.arange(0, BD)
    ot = tl.arange(0, BT)
    after = i_s * HKV + i_hk
    before = after - HKV
    nh = n * HKV + i_hk
    # The state before a segment is what it starts from, and that state's gradient what the one before ends with.
    inner = tl.where(start > first, 1, 0)
    acc = tl.zeros([BE], tl.float32)
    of_z = tl.zeros([BD], tl.float32)
    if STARTS == "carried":
        numbers = inner * (D * V + D)
        for e in range(0, numbers, BE):
            x = tl.load(starts + after * (D * V + D) + e + oe, mask=e + oe < numbers, other=0.0)
            acc += x * tl.load(ends + before * (D * V + D) + e + oe, mask=e + oe < numbers, other=0.0)
    elif STARTS == "stored":
        numbers = inner * (D * V)
        for e in range(0, numbers, BE):
            x = tl.load(starts + after * (D * V) + e + oe, mask=e + oe < numbers, other=0.0).to(tl.float32)
            y = tl.load(ends + before * (D * V) + e + oe, mask=e + oe < numbers, other=0.0)
            acc += x * y.to(tl.float32)
        w = whole_z(start_parts + after * (3 * D), od, od < inner * D, D)
        of_z += w * whole_z(end_parts + before * (3 * D), od, od < inner * D, D)
    if INITIAL:
        numbers = (1 - inner) * (D * V)
        for e in range(0, numbers, BE):
            x = tl.load(kv0 + nh * (D * V) + e + oe, mask=e + oe < numbers, other=0.0)
            acc += x * tl.load(dkv0 + nh * (D * V) + e + oe, mask=e + oe < numbers, other=0.0)
        w = tl.load(z0 + nh * D + od, mask=od < (1 - inner) * D, other=0.0)
        of_z += w * tl.load(dz0 + nh * D + od, mask=od < (1 - inner) * D, other=0.0)
    total = (tl.sum(acc) + tl.sum(of_z)).to(tl.float64)
    g = keys_of(g, row, i_hk, g_b, g_h, g_t, delay, DELAYED)
    dg = keys_of(dg, row, i_hk, dg_b, dg_h, dg_t, delay, DELAYED)
    drawn += (row * HKV + i_hk) * OF_K * T
    asked += (row * HKV + i_hk) * OF_Q * T
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    for c in range(start, end, BT):
        rows = rows_before(end, c, ot)
        there, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        grown = tl.zeros([BT], tl.float64)
        for i in range(OF_K):
            grown += tl.load(drawn + i * T + c + ot, mask=rows, other=0.0)
        for i in range(OF_Q):
            grown -= tl.load(asked + i * T + c + ot, mask=rows, other=0.0)
        is_reset = resets(g + (c + ot) * g_t, counts)
        # What came before is added to the first row, where that is no reset.
        joined = grown + tl.where((ot == 0) & (is_reset == 0), total, 0.0)
        sums, _ = tl.associative_scan((joined, is_reset), 0, sum_anew)
        found = tl.where(counts, sums - grown, 0.0)
        tl.store(dg + (c + ot) * dg_t, found.to(dg.dtype.element_ty), mask=there)
        total = tl.sum(tl.where(ot == BT - 1, sums, 0.0), 0)


class Starts(NamedTuple):
    """What each segment starts from.

    Attributes:
        states: For walks that carry them ``[segments, HKV, D V + D]``, fp32; for walks that read them
            ``[segments, HKV, D, V]`` in the dtype of products.
        parts: The normaliser for the latter, ``[segments, HKV, 3, D]``: the three sum up to it.
    """

    states: Tensor | None = None
    parts: Tensor | None = None

    def source(self, initial: Tensor | None) -> str:
        """Return where a walk that carries its state gets it from, where sequences begin with ``initial``."""
        return "segment" if self.states is not None else "none" if initial is None else "sequence"


class Fades(NamedTuple):
    """Sums of log decays, to base 2; without members where nothing fades.

    Attributes:
        b: From the segment's start up to each row ``[B, HKV, 2, T]``, fp32; the sum of both is meant.
        totals: Over each segment ``[segments, HKV]``, fp32.
    """

    b: Tensor | None = None
    totals: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that kernels take of it."""
        return {"b": self.b, "totals": self.totals, "FADED": self.b is not None}


def fade_launches(p: Problem, segments: Segments) -> tuple[Fades, list[Launch]]:
    """Plan the sums of log decays over segments; nothing where nothing fades."""
    g = p.log_decay
    if g is None:
        return Fades(), []
    (B, HKV, _), T, device = g.shape, p.q.shape[2], g.device
    b = torch.empty(B, HKV, 2, T, dtype=torch.float32, device=device)
    totals = torch.empty(segments.count, HKV, dtype=torch.float32, device=device)
    fades = Fades(b, totals)
    known = p.shared(segments) | fades.arguments() | {"g": g, "BT": TILE.tokens}
    return fades, [planned("fade", fade_kernel, segments.count * HKV, known, TILE, (g,), (b,))]


def fade_back_launch(
    p: Problem,
    g: Tensor,
    segments: Segments,
    drawn: Tensor,
    asked: Tensor,
    dlog_decay: Tensor,
    initial: tuple[Tensor, Tensor],
    starts: Starts,
    ends: Starts,
) -> Launch:
    """Plan the gradients of log decays ``g``, written to ``dlog_decay``.

    What queries draw from each key, ``drawn [B, HKV, tiles of features, T]``, and what each query draws, ``asked`` with
    H heads, are meant as sums over tiles; ``initial`` is the gradient of the state before the first token.
    """
    stored = "carried" if starts.parts is None else "stored"
    known = {
        **p.shared(segments),
        **{"drawn": drawn, "asked": asked, "OF_K": drawn.shape[2], "OF_Q": p.group * asked.shape[2]},
        **{"kv0": p.kv0, "z0": p.z0, "dkv0": initial[0], "dz0": initial[1], "INITIAL": p.kv0 is not None},
        **{"starts": starts.states, "start_parts": starts.parts, "ends": ends.states, "end_parts": ends.parts},
        "STARTS": "none" if starts.states is None else stored,
        **{"g": g, "dg": dlog_decay, "BD": padded(p.k.shape[3]), "BE": 1024, "BT": TILE.tokens},
    }
    programs = segments.count * p.k.shape[1]
    return planned("fade_back", fade_back_kernel, programs, known, TILE, (g, drawn, asked), (dlog_decay,))
