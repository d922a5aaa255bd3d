"""Gradients of the window's kernels: those of the queries, then those of the keys; `forward` has the formulas."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, planned
from hf_linear_attn.ops.triton.primitives import LOG2E, dot, load_operand, load_tile, operand, product, store_tile
from hf_linear_attn.ops.window.triton.forward import WindowForward
from hf_linear_attn.ops.window.triton.kept import kept_launches
from hf_linear_attn.ops.window.triton.problem import WindowProblem, fp32
from hf_linear_attn.ops.window.triton.sight import far, first_key, key_codes, load_kept, load_sinks, near
from hf_linear_attn.ops.window.triton.sums import scan_launch

LEAST = tl.constexpr(1e-20)
"""Weights of own keys up to here have no gradients: what is divided by them might not be finite."""


@triton.jit(do_not_specialize=["T", "S", "P", "W", "NB", "K", "NQ", "scaling", "c_b"])
def window_dq_kernel(
    q, k, v, codes, sink_k, sink_v, seen, f, number, prefix, weight, kept_k, kept_v, held, begins, ends,
    o, lse, score, do, delta, dq, df, dscore, dsums, dweight, dsink_k, dsink_v, den, over, delta_f,
    T, S, P, W, NB, K, NQ, scaling, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, f_b, f_h, f_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    df_b, df_h, df_t, c_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, SUMS: tl.constexpr, OF_Q: tl.constexpr, OF_SINKS: tl.constexpr,
    LINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what BT queries of a head get: dq, df, their scores' gradients, and their parts of smaller gradients.

    ``delta``, which is ``do . o``, is for the keys. ``LINEAR``: in place of df, what linear attention that read f needs
    to derive by do itself; see :class:`Far`.
    """
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(T, BT)
    i_b = (pid // H // tl.cdiv(T, BT)).to(tl.int64)
    i_hk = i_h // G
    c = i_t.to(tl.int64) * BT
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    rows = ot < (T - c).to(tl.int32)
    kv_head = i_b * (H // G) + i_hk
    row = (i_b * H + i_h) * T + c + ot
    part = (i_b * H + i_h) * tl.cdiv(T, BT) + i_t
    k += i_b * k_b + i_hk.to(tl.int64) * k_h
    v += i_b * v_b + i_hk.to(tl.int64) * v_h
    if MASKED:
        codes += i_b * c_b
    # [BT, BV]
    do += i_b * do_b + i_h.to(tl.int64) * do_h + c * do_t
    dd = load_operand(do, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
    o += i_b * o_b + i_h.to(tl.int64) * o_h + c * o_t
    oo = load_tile(o, ot[:, None] * o_t + ov[None, :], rows, ov < V, EXACT_V)
    tl.store(delta + row, tl.sum(oo.to(tl.float32) * dd.to(tl.float32), 1), mask=rows)
    # Read again, it takes fewer registers than in the layout of a sum.
    tl.debug_barrier()
    dl = tl.load(delta + row, mask=rows, other=0.0)
    # [BT, BD]
    q += i_b * q_b + i_h.to(tl.int64) * q_h + c * q_t
    x = load_operand(q, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D, PRECISION)
    z = tl.load(lse + row, mask=rows, other=0.0)
    base2 = scaling * LOG2E
    acc = tl.zeros([BT, BD], tl.float32)
    start = first_key(c, P, W, BLOCK)
    if OWN:
        # [BT, BV]
        f += i_b * f_b + i_h.to(tl.int64) * f_h + c * f_t
        ff = load_tile(f, ot[:, None] * f_t + ov[None, :], rows, ov < V, EXACT_V)
        w = tl.exp2(tl.load(score + row, mask=rows, other=float("-inf")) - z)
        of_own = tl.sum(ff.to(tl.float32) * dd.to(tl.float32), 1)
        if LINEAR:
            n = tl.load(den + row, mask=rows, other=1.0)
            tl.store(over + row, tl.where(w > LEAST, n / tl.maximum(w, LEAST), float("inf")), mask=rows)
            tl.store(delta_f + row, of_own, mask=rows)
        else:
            df += i_b * df_b + i_h.to(tl.int64) * df_h + c * df_t
            store_tile(df, ot[:, None] * df_t + ov[None, :], w[:, None] * dd.to(tl.float32), rows, ov < V, EXACT_V)
        de = w * (of_own - dl)
        tl.store(dscore + row, de, mask=rows)
        if SUMS:
            n = tl.load(number + i_b * T + c + ot, mask=rows, other=0).to(tl.float32)
            dm = de * scaling / tl.maximum(n, 1.0)
            y = x.to(tl.float32)
            tl.store(dsums + part * D + od, tl.sum(y * dm[:, None], 0), mask=od < D)
            tl.store(dweight + part * D + od, tl.sum(y * de[:, None], 0), mask=od < D)
            u = tl.load(weight + i_h * D + od, mask=od < D, other=0.0).to(tl.float32)
            keys = tl.load(prefix + (kv_head * NB + start // BLOCK) * D + od, mask=od < D, other=0.0)
            acc += dm[:, None] * keys[None, :] + de[:, None] * u[None, :]
    if OF_Q:
        for i in range(start.to(tl.int32), (P + c).to(tl.int32) + BT, BN):
            j = tl.cast(i, tl.int64)
            _, code = key_codes(codes, j, on, S, MASKED)
            # [BN, BD] and [BN, BV]
            kk = load_operand(k + j * k_t, on[:, None] * k_t + od[None, :], code != 0, od < D, EXACT_D, PRECISION)
            vv = load_operand(v + j * v_t, on[:, None] * v_t + ov[None, :], code != 0, ov < V, EXACT_V, PRECISION)
            code = code[None, :]
            distance = (P + c - j).to(tl.int32) + ot[:, None] - on[None, :]
            s = product(x, tl.trans(kk), PRECISION)
            p = tl.where(near(distance, code, W), tl.exp2(s * base2 - z[:, None]), 0.0)
            ds = p * (product(dd, tl.trans(vv), PRECISION) - dl[:, None]) * scaling
            if SUMS:
                ds += tl.where(far(distance, code, W), dm[:, None], 0.0)
            acc = dot(operand(ds, x.dtype, PRECISION), kk, acc, PRECISION)
        if C > 0:
            block = c // BLOCK
            kept_k += kv_head * K * D
            kept_v += kv_head * K * V
            held += (kv_head * NQ + block) * C
            for i in range(0, C + (c - block * BLOCK).to(tl.int32) + BT, BN):
                kk, vv, begin, end = load_kept(
                    kept_k, kept_v, held, begins + i_b * K, ends + kv_head * K, i + on, C + block * BLOCK, K, od, ov,
                    D, V, EXACT_D, EXACT_V, C, BLOCK, PRECISION,
                )  # fmt: skip
                visible = (begin[None, :] <= (c + ot)[:, None]) & ((c + ot)[:, None] < end[None, :])
                p = tl.where(visible, tl.exp2(product(x, tl.trans(kk), PRECISION) * base2 - z[:, None]), 0.0)
                ds = p * (product(dd, tl.trans(vv), PRECISION) - dl[:, None]) * scaling
                acc = dot(operand(ds, x.dtype, PRECISION), kk, acc, PRECISION)
    if SINKS > 0 and (OF_Q or OF_SINKS):
        os = tl.arange(0, BS)
        visible, kk, vv = load_sinks(
            sink_k, sink_v, seen, i_b * T + c + ot, rows, kv_head, os, (od,), (ov,),
            D, V, EXACT_D, EXACT_V, SINKS, PRECISION,
        )  # fmt: skip
        kk, vv = kk[0], vv[0]
        p = tl.where(visible, tl.exp2(product(x, tl.trans(kk), PRECISION) * base2 - z[:, None]), 0.0)
        ds = p * (product(dd, tl.trans(vv), PRECISION) - dl[:, None]) * scaling
        ds = operand(ds, x.dtype, PRECISION)
        acc = dot(ds, kk, acc, PRECISION)
        if OF_SINKS:
            dk = product(tl.trans(ds), x, PRECISION)
            dv = product(tl.trans(operand(p, x.dtype, PRECISION)), dd, PRECISION)
            inside = (os < SINKS)[:, None]
            tl.store(dsink_k + part * SINKS * D + os[:, None] * D + od[None, :], dk, mask=inside & (od < D)[None, :])
            tl.store(dsink_v + part * SINKS * V + os[:, None] * V + ov[None, :], dv, mask=inside & (ov < V)[None, :])
    if OF_Q:
        dq += i_b * dq_b + i_h.to(tl.int64) * dq_h + c * dq_t
        store_tile(dq, ot[:, None] * dq_t + od[None, :], acc, rows, od < D, EXACT_D)


@triton.jit(do_not_specialize=["T", "S", "P", "W", "NT", "scaling", "c_b"])
def window_dkv_kernel(
    q, k, v, codes, number, lse, dscore, do, delta, later, dk, dv,
    T, S, P, W, NT, scaling, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, c_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of BN keys of a head."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_hk = pid % HKV
    i_n = (pid // HKV) % tl.cdiv(S, BN)
    i_b = (pid // HKV // tl.cdiv(S, BN)).to(tl.int64)
    j = i_n.to(tl.int64) * BN
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    if MASKED:
        codes += i_b * c_b
    there, code = key_codes(codes, j, on, S, MASKED)
    # [BN, BD] and [BN, BV]
    k += i_b * k_b + i_hk.to(tl.int64) * k_h + j * k_t
    v += i_b * v_b + i_hk.to(tl.int64) * v_h + j * v_t
    kk = load_operand(k, on[:, None] * k_t + od[None, :], code != 0, od < D, EXACT_D, PRECISION)
    vv = load_operand(v, on[:, None] * v_t + ov[None, :], code != 0, ov < V, EXACT_V, PRECISION)
    real = (code != 0)[:, None]
    code = code[:, None]
    base2 = scaling * LOG2E
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    # From the first query that sees one of these keys to the last.
    begin = tl.maximum(j - P, 0) // BT * BT
    end = tl.minimum(j + BN - 1 + W - P, T)
    if SUMS:
        # To the end of the last block of queries whose tiles begin no later than here. Those after it count the keys in
        # a sum; there is one after each tile of PART queries.
        last = (j // BLOCK * BLOCK + BLOCK - 2 + W - P) // BLOCK
        end = tl.minimum((last + 1) * BLOCK, T)
        i_p = (last + 1) * (BLOCK // PART) - 1
        if i_p < NT:
            r = tl.load(later + ((i_b * HKV + i_hk) * NT + i_p) * D + od, mask=od < D, other=0.0)
            acc_k += tl.where((code & 2) != 0, r[None, :], 0.0)
    for g in range(G):
        i_h = (i_hk * G + g).to(tl.int64)
        row = (i_b * (HKV * G) + i_h) * T + ot
        for i in range(begin.to(tl.int32), end.to(tl.int32), BT):
            c = tl.cast(i, tl.int64)
            rows = ot < (T - i)
            # [BT, BD] and [BT, BV]
            x = load_operand(
                q + i_b * q_b + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D, PRECISION
            )
            dd = load_tile(
                do + i_b * do_b + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V
            )
            distance = (P + c - j).to(tl.int32) + ot[None, :] - on[:, None]
            s = product(kk, tl.trans(x), PRECISION)
            # Loaded where they are needed: registers hold no more.
            z = tl.load(lse + row + c, mask=rows, other=0.0)
            p = tl.where(near(distance, code, W), tl.exp2(s * base2 - z[None, :]), 0.0)
            dl = tl.load(delta + row + c, mask=rows, other=0.0)
            acc_v = dot(operand(p, x.dtype, PRECISION), dd, acc_v, PRECISION)
            ds = p * (product(vv, tl.trans(dd), PRECISION) - dl[None, :]) * scaling
            if SUMS:
                n = tl.load(number + i_b * T + c + ot, mask=rows, other=0).to(tl.float32)
                dm = tl.load(dscore + row + c, mask=rows, other=0.0) * scaling / tl.maximum(n, 1.0)
                ds += tl.where(far(distance, code, W), dm[None, :], 0.0)
            acc_k = dot(operand(ds, x.dtype, PRECISION), x, acc_k, PRECISION)
    dk += i_b * dk_b + i_hk.to(tl.int64) * dk_h + j * dk_t
    dv += i_b * dv_b + i_hk.to(tl.int64) * dv_h + j * dv_t
    if MASKED:
        acc_k, acc_v = tl.where(real, acc_k, 0.0), tl.where(real, acc_v, 0.0)
    store_tile(dk, on[:, None] * dk_t + od[None, :], acc_k, there, od < D, EXACT_D)
    store_tile(dv, on[:, None] * dv_t + ov[None, :], acc_v, there, ov < V, EXACT_V)


class WindowWanted(NamedTuple):
    """Which gradients are asked for; those of the queries' own keys are few and always computed.

    Attributes:
        q: Of the queries.
        kv: Of the keys, of their values, or of the sum of keys from before.
        sinks: Of the sinks' keys or values.
        kept: Of the kept keys or their values.
    """

    q: bool = True
    kv: bool = True
    sinks: bool = True
    kept: bool = True


EVERY = WindowWanted()


class Far(NamedTuple):
    """What linear attention needs of the backward, where f is what it read: ``df = w do``, of a weight w per query.

    So its own backward takes do in place of df, and w into the normaliser by which it divides.

    Attributes:
        den: Its guarded normalisers ``[B, H, T]``, fp32, and so are the others.
        over: ``den / w``, written; infinite where w is 0, so that what is divided by it is 0.
        delta_f: ``do . f``, likewise.
    """

    den: Tensor
    over: Tensor
    delta_f: Tensor


class WindowBackward(NamedTuple):
    """What the kernels of the backward write; tensors are empty where not asked for.

    Attributes:
        dq: ``[B, H, T, D]``.
        dk: ``[B, HKV, S, D]``.
        dv: ``[B, HKV, S, V]``.
        df: ``[B, H, T, V]``; empty also where :class:`Far` is written. This and all that follow are empty also where
            there is nothing to derive by.
        dscore: Gradient of the scores of own keys ``[B, H, T]``, fp32, and so are the others.
        dweight: That of the weight, by tile of queries ``[B, H, tiles, D]``.
        dbefore: That of the sum of keys from before ``[B, HKV, D]``.
        dsink_k: That of the sinks, by tile of queries ``[B, H, tiles, n, D]``.
        dsink_v: ``[B, H, tiles, n, V]``.
        dkept_k: That of the kept keys ``[B, HKV, C + T, D]``, in their dtype.
        dkept_v: ``[B, HKV, C + T, V]``, likewise.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    df: Tensor
    dscore: Tensor
    dweight: Tensor
    dbefore: Tensor
    dsink_k: Tensor
    dsink_v: Tensor
    dkept_k: Tensor
    dkept_v: Tensor


def allocate_window_backward(p: WindowProblem, wanted: WindowWanted, linear: bool = False) -> WindowBackward:
    """Allocate the gradients; ``linear``: without df."""
    (B, H, T, D), (_, HKV, _, V) = p.q.shape, p.v.shape
    own, of_sums = p.f is not None, p.sums
    tiles = -(-T // p.tile("window_dq").tokens)

    def tokens(x: Tensor, dim: int, asked: bool) -> Tensor:
        return empty_like_tokens(x, dim) if asked else x.new_empty(0)

    def rows(asked: bool, *sizes: int) -> Tensor:
        return fp32(p, *sizes) if asked else fp32(p, 0)

    return WindowBackward(
        tokens(p.q, D, wanted.q),
        tokens(p.k, D, wanted.kv),
        tokens(p.v, V, wanted.kv),
        tokens(p.q, V, own and not linear),
        rows(own, B, H, T),
        rows(of_sums, B, H, tiles, D),
        rows(of_sums and wanted.kv, B, HKV, D),
        rows(wanted.sinks, B, H, tiles, p.sinks, D),
        rows(wanted.sinks, B, H, tiles, p.sinks, V),
        *(x.new_empty(x.shape if wanted.kept and p.kept else 0) for x in (p.kept or (p.k, p.v))[:2]),
    )


def window_backward_launches(
    p: WindowProblem, saved: WindowForward, do: Tensor, wanted: WindowWanted = EVERY, linear: Far | None = None
) -> tuple[WindowBackward, list[Launch]]:
    """Plan the backward: the gradients, allocated but not computed, and the launches that compute them, in order."""
    q, k, v = p.q, p.k, p.v
    (B, H, T, D), (_, HKV, S, _) = q.shape, v.shape
    of_queries, of_keys = p.tile("window_dq"), p.tile("window_dkv")
    tiles = -(-T // of_queries.tokens)
    out = allocate_window_backward(p, wanted, linear is not None)
    delta = torch.empty_like(saved.lse)
    dsums = torch.empty_like(out.dweight)
    launches = []
    given = {**saved._asdict(), "do": do, "delta": delta, **out._asdict()}
    known = p.shared(of_queries) | given | {"dsums": dsums, "OF_Q": wanted.q, "OF_SINKS": wanted.sinks}
    known |= {"LINEAR": linear is not None, **(dict.fromkeys(Far._fields) if linear is None else linear._asdict())}
    reads: tuple[Tensor, ...] = (q, saved.o, do, saved.lse)
    writes: tuple[Tensor, ...] = (delta,)
    if wanted.q:
        reads, writes = (*reads, k, v, *(() if p.kept is None else p.kept[:2])), (*writes, out.dq)
    if p.f is not None:
        of_f = (out.df,) if linear is None else (linear.over, linear.delta_f)
        reads, writes = (*reads, p.f, saved.score), (*writes, out.dscore, *of_f)
    launches.append(planned(p.role("window_dq"), window_dq_kernel, B * H * tiles, known, of_queries, reads, writes))
    if p.kept is not None and wanted.kept:
        launches += kept_launches(p, p.kept, given)
    if not wanted.kv:
        return out, launches
    later = out.dweight
    if p.sums:
        later = fp32(p, B, HKV, tiles, D)
        launches.append(scan_launch(p, dsums, None, later, out.dbefore, reverse=True))
    known = p.shared(of_keys) | given | {"later": later, "NT": tiles, "PART": of_queries.tokens}
    reads = (q, k, v, do, saved.lse, delta, *((out.dscore,) if p.sums else ()))
    programs = B * HKV * -(-S // of_keys.width)
    launches.append(planned("window_dkv", window_dkv_kernel, programs, known, of_keys, reads, (out.dk, out.dv)))
    return out, launches
