"""Gradients of queries through linear attention and their learned map, in one kernel.

With ``w = 1 / den`` per query and ``delta = do . o``, as in `linear_attention/triton/gradients.py`::

    dphi_q = w (tril(do v^T - delta) phi_k + do S^T - delta z^T)

from stored sums, and on through the map, as in `features/triton/kernels.py`: y computed anew from q, and from its
gradient dq, and dW summed over the program's tokens. So dphi_q, twice as large as q, never crosses memory. A program
walks tiles of BT queries of one head, W in fast memory throughout, and each tile goes through its segment's keys so
far, BN at a time; features are two halves of BM columns. Accumulators are fp32.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment,var-annotated"

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.features.triton.kernels import (
    FeatureGradients,
    FeatureProblem,
    allocate_features_backward,
    derive,
    load_halves,
    load_weight_halves,
    project_halves,
    write_products,
)
from hf_linear_attn.ops.linear_attention.triton.backward import starts_launches
from hf_linear_attn.ops.linear_attention.triton.fade import Fades
from hf_linear_attn.ops.linear_attention.triton.model import choose
from hf_linear_attn.ops.linear_attention.triton.steps import whole_z
from hf_linear_attn.ops.triton.plan import Launch, Problem, padded, planned
from hf_linear_attn.ops.triton.primitives import (
    dot,
    key_rows,
    keys_of,
    load_operand,
    load_tile,
    mask_of,
    opaque,
    operand,
    product,
    rows_before,
    store_tile,
)


@triton.jit
def stored_half(
    dd, dl, starts, parts, om, ov, F: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    EXACT_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``do S^T - delta z^T`` of M of F features, where a state and its normaliser's parts begin."""
    # [BM, BV]
    s = load_tile(starts, om[:, None] * V + ov[None, :], om < M, ov < V, EXACT_V)
    return product(dd, tl.trans(s), PRECISION) - dl[:, None] * whole_z(parts, om, om < M, F)[None, :]


@triton.jit(do_not_specialize=["T", "L", "WALK", "delay", "factor", "sharpness", "d_b", "m_b"])
def queries_backward_kernel(
    q, turns, k, v, mask, do, den, delta, starts, parts, weight, power, dy, dx, dweight, dpower,
    T, L, WALK, delay, H, G, factor, sharpness,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dy_b, dy_h, dy_t, dx_b, dx_h, dx_t,
    t_b, d_b, m_b, w_h, w_d, p_h,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, MAP: tl.constexpr, QUERY: tl.constexpr,
    MASKED: tl.constexpr, DELAYED: tl.constexpr, SPLIT: tl.constexpr,
    OF_X: tl.constexpr, OF_WEIGHT: tl.constexpr, ADD: tl.constexpr, HELD: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ``q W`` and of q of WALK queries of one head, and their parts of W's and of the power's.

    Queries come in blocks, as of `features_backward_kernel`. ``k`` are the keys' features ``[., ., ., 2 M]``.
    """
    F: tl.constexpr = 2 * M
    EXACT_M: tl.constexpr = M == BM
    EXACT_V: tl.constexpr = V == BV
    kind: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float16 else q.dtype.element_ty
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    i_w = (pid // H) % tl.cdiv(T, WALK)
    row = (pid // H // tl.cdiv(T, WALK)).to(tl.int64)
    i_hk = i_h // G
    om = tl.arange(0, BM)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    q += row * q_b + i_h * q_h
    do += row * do_b + i_h * do_h
    dy += row * dy_b + i_h * dy_h
    dx += row * dx_b + i_h * dx_h
    den += row * d_b + i_h * T
    delta += row * d_b + i_h * T
    k = keys_of(k, row, i_hk, k_b, k_h, k_t, delay, DELAYED)
    v = keys_of(v, row, i_hk, v_b, v_h, v_t, delay, DELAYED)
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    if R > 0:
        turns += row * t_b
    weight += i_h * w_h
    w_a, rest_a, w_b, rest_b = load_weight_halves(weight, w_d, om, D, M, kind, PRECISION, SPLIT)
    a = 0.0
    if MAP == "norm_preserving":
        a = tl.load(power + i_h * p_h).to(tl.float32)
    sum_p = tl.zeros([BT], tl.float32)
    begin = i_w.to(tl.int64) * WALK
    stop = tl.minimum(begin + WALK, T)
    piece = (row * H + i_h) * tl.cdiv(T, WALK) + i_w
    dy += i_w.to(tl.int64) * BLOCK * dy_t
    dweight += piece * (D * M)
    for start in tl.range(begin, stop, BLOCK, disable_licm=True):
        last = tl.minimum(start + BLOCK, stop)
        # Memory for dy is that of the block before.
        tl.debug_barrier()
        # What the tile's many parts do not share is computed where it is needed: before the loop it would fill the
        # stack.
        for i in tl.range(0, tl.cdiv(last - start, BT), disable_licm=True):
            c = start + i * BT
            rows = ot < (T - c).to(tl.int32)
            # [BT, BV]
            dd = load_operand(do + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
            dl = tl.load(delta + c + ot, mask=rows, other=0.0)
            sh = (row * tl.cdiv(T, L) + c // L) * (H // G) + i_hk
            state = starts + sh * (F * V)
            mass = parts + sh * (3 * F)
            # [BT, BM] twice
            above = stored_half(dd, dl, state, mass, om, ov, F, M, V, EXACT_V, PRECISION)
            below = stored_half(dd, dl, state + M * V, mass + M, om, ov, F, M, V, EXACT_V, PRECISION)
            for j in range(c // L * L, tl.minimum(c + BT, T), BN):
                _, counts = key_rows(mask, j, rows_before(T, j, on), on, 0, delay, MASKED, DELAYED)
                # [BN, BV], and [BN, BM] twice
                vv = load_operand(v + j * v_t, on[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
                visible = (c - j).to(tl.int32) + ot[:, None] >= on[None, :]
                p = opaque(tl.where(visible, product(dd, tl.trans(vv), PRECISION) - dl[:, None], 0.0), PIN)
                fk = load_operand(k + j * k_t, on[:, None] * k_t + om[None, :], counts, om < M, EXACT_M, PRECISION)
                p = operand(p, fk.dtype, PRECISION)
                above = dot(p, fk, above, PRECISION)
                fk = load_operand(k + j * k_t + M, on[:, None] * k_t + om[None, :], counts, om < M, EXACT_M, PRECISION)
                below = dot(p, fk, below, PRECISION)
            w = 1.0 / tl.load(den + c + ot, mask=rows, other=1.0)
            # As rounded as where they crossed memory.
            above = (above * w[:, None]).to(kind).to(tl.float32)
            below = (below * w[:, None]).to(kind).to(tl.float32)
            of_tokens = turns
            if R > 0:
                of_tokens = turns + c * R
            first, second = load_halves(q + c * q_t, q_t, of_tokens, ot, rows, D, R, PRECISION, PIN)
            y = project_halves(first, second, w_a, rest_a, w_b, rest_b, factor, PRECISION, SPLIT)
            g, dp = derive(y, above, below, a, sharpness, om, M, MAP, QUERY, q.dtype.element_ty, PIN)
            sum_p += dp
            store_tile(dy + (c - start) * dy_t, ot[:, None] * dy_t + om[None, :], g * factor, rows, om < M, EXACT_M)
        if OF_X or OF_WEIGHT:
            write_products(
                q, turns, weight, dy, dx, dweight, w_a, w_b, w_d, start, last, start > begin, T, q_t, dy_t, dx_t,
                om, ot, D, M, R, kind, PRECISION, OF_X, OF_WEIGHT, ADD, HELD, PIN,
            )  # fmt: skip
    if MAP == "norm_preserving":
        tl.store(dpower + piece, tl.sum(sum_p, 0))


def queries_backward_launches(
    p: Problem, of_map: FeatureProblem, do: Tensor, den: Tensor, delta: Tensor, into: Tensor | None, of_weight: bool
) -> tuple[FeatureGradients, list[Launch]]:
    """Plan what queries get through the linear branch and their map, those of q added to ``into`` if asked for.

    Args:
        p: The linear branch over features, of which only the keys' are read; causal, and not packed.
        of_map: The map of its queries; these are read as two halves.
        do: Gradient of its outputs ``[B, H, T, V]``.
        den: What its outputs were divided by ``[B, H, T]``, fp32.
        delta: ``do . o``, likewise.
        into: Gradient of q so far ``[B, H, T, D]``; None if it is not asked for.
        of_weight: Whether the gradient of W is asked for.

    Returns:
        The gradients, allocated but not computed, and the launches that compute them, in order.
    """
    cut = choose(p, "dq", stored=True)
    starts, launches = starts_launches(p, cut, Fades())
    chosen = p.tile("queries_backward")
    found = allocate_features_backward(of_map, False, of_weight)
    walk = of_map.walk("features_backward")
    segments = p.segments(p.q.shape[2], cut.length)
    known = p.shared(segments) | of_map.known() | {"q": of_map.x, "do": do, "den": den, "delta": delta}
    known |= {"starts": starts.states, "parts": starts.parts, "d_b": den.stride(0), "WALK": walk}
    known["BLOCK"] = of_map.tile("features_backward").width
    known |= {"dy": found.dy, "dx": found.dx if into is None else into, "dweight": found.dweight}
    known |= {"dpower": found.dpower, "V": p.v.shape[3], "BV": p.padded(p.v.shape[3])}
    known |= {"BT": chosen.tokens, "BN": chosen.width, "OF_X": into is not None, "ADD": into is not None}
    known |= {"OF_WEIGHT": of_weight, "HELD": of_map.held(chosen), "BM": padded(of_map.weight.shape[2])}
    reads = (of_map.x, do, den, delta, p.k, p.v, *(() if of_map.turns is None else (of_map.turns,)))
    writes: tuple[Tensor, ...] = (found.dy, found.dweight)
    if into is not None:
        reads, writes = (*reads, into), (*writes, into)
    (B, H, T, _) = p.q.shape
    programs = B * H * -(-T // walk)
    launch = planned("queries_backward", queries_backward_kernel, programs, known, chosen, reads, writes)
    return found, [*launches, launch]
