"""The PyTorch backend: a walk over spans of chunks that carries the state, with a backward of its own.

Within a chunk of C tokens the quadratic form is used, across chunks the state::

    o_c = (tril(phi(q_c) phi(k_c)^T) [v_c, 1] + phi(q_c) [S, z]),  [S, z] += phi(k_c)^T [v_c, 1]

so the normaliser is one more column of the values. A span of a few chunks goes through one batched product each, as
many calls as a single chunk would need. The backward walks twice, forwards for dq and in reverse for dk and dv; each
recomputes features and states, so that memory stays O(T (D + V)): nothing of size ``[T, C]`` or ``[T / C, F, V]`` is
ever kept (keeping each chunk's state is bound by memory traffic and three times slower).
All sums are fp32, fp64 for fp64 input.

Where sums fade, b is the sum of the log decays of a chunk up to each of its tokens, and every factor is at most 1::

    o_c = exp(b) phi(q_c) [S, z] + (tril(exp(b - b^T)) * phi(q_c) phi(k_c)^T) [v_c, 1]
    [S, z] = exp(b_C) [S, z] + (exp(b_C - b) phi(k_c))^T [v_c, 1]

A query's sums scale with exp(b), and what a key adds to later ones with exp(-b), so the gradient of b is
``phi_q . dphi_q - phi_k . dphi_k``, that of a log decay its sum over the tokens from there on.

A delay shifts keys against queries: the first queries read the initial state alone, the last keys are never read, and
in between query t meets key t - delay, as without one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.chunks import LEAST_LOG_DECAY, Span, pieces, sequences, spans
from hf_linear_attn.ops.library import operator, refuse_functional, refuse_transforms
from hf_linear_attn.ops.linear_attention.problem import FORWARD, INPUTS, LinearCall
from hf_linear_attn.ops.linear_attention.reference import guarded
from hf_linear_attn.ops.linear_attention.walk import Walk, causal_, running_, scale_, scaled, walks
from hf_linear_attn.ops.state import LinearAttentionState, empty_like_tokens

CHUNK = 32
"""Tokens per chunk; on CPUs, where 4 heads share keys, 32 takes a sixth less time than 64 and 16 none less (fp32)."""

SPAN = 128
"""Tokens per span; so many that calls are few, so few that the states of its chunks stay in a core's cache."""


def linear_attention_chunked(call: LinearCall) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention chunk by chunk."""
    refuse_functional("torch", call.q, call.k, call.v, call.kv0, call.z0, call.log_decay)
    o, _, kv, z = chunked_forward(*call)
    return o, LinearAttentionState(kv, z)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``o [B, H, T, V]``, the guarded normaliser ``[B, H, T]``, and the final ``kv`` and ``z``."""
    call = LinearCall(*inputs)
    q, k, causal, eps, signed = call.q, call.k, call.causal, call.eps, not elementwise_map(call.phi).non_negative
    o, den, kv, z = _allocate(call)

    def divide(walk: Walk, o: Tensor, den: Tensor, span: Span, o1: Tensor) -> None:
        o, d = walk.cut(o, span), walk.cut(den[..., None], span)
        o1 = o1.view(*o.shape[:-1], -1)
        if signed:
            d.copy_(guarded(o1[..., -1:], eps))
        else:
            torch.add(o1[..., -1:], eps, out=d)
        torch.div(o1[..., :-1], d, out=o)

    for state_rows, q_tokens, k_tokens in sequences(q.shape[2], k.shape[2], call.cu_seqlens):
        one = call.sequence(state_rows, q_tokens, k_tokens)
        far, near, lead = walks(one)
        o_rows, den_rows = o[:, :, q_tokens], den[:, :, q_tokens]
        s1 = far.state(one.kv0, one.z0)
        if not causal:
            for span in pieces(far.k.shape[2], SPAN):
                phi_k, v1 = far.keys_and_values(span)
                s1.baddbmm_(phi_k.transpose(1, 2), v1)
        for span in pieces(lead, SPAN):
            divide(far, o_rows[:, :, :lead], den_rows[:, :, :lead], span, torch.bmm(far.queries(span), s1))
        for span in spans(near.q.shape[2], CHUNK, SPAN):
            phi_q, (phi_k, v1), fade = near.queries(span), near.keys_and_values(span), near.fade(span)
            before = near.before_(s1, phi_k, v1, span, fade)
            o1 = torch.bmm(phi_q, before)
            if fade is not None:
                scale_(o1, fade.read)
            o1.baddbmm_(causal_(torch.bmm(phi_q, phi_k.transpose(1, 2)), fade), v1)
            divide(near, o_rows[:, :, lead:], den_rows[:, :, lead:], span, o1)
        s1 = torch.unflatten(s1, 0, (-1, k.shape[1]))
        kv[state_rows], z[state_rows] = s1[..., :-1], s1[..., -1]
    return o, den, kv, z


def _allocate(call: LinearCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, shape = call.q, (call.rows, *call.k.shape[1::2], call.v.shape[3])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    den = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    kv = torch.empty(shape, dtype=dtype, device=q.device)
    z = torch.empty(shape[:3], dtype=dtype, device=q.device)
    return empty_like_tokens(q, call.v.shape[3]), den, kv, z


chunked_forward = operator("chunked_forward", _forward, lambda *inputs: _allocate(LinearCall(*inputs)), schema=FORWARD)


def _gradients(
    do: Tensor, dkv: Tensor, dz: Tensor, o: Tensor, den: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, of the initial ``kv`` and ``z``, and of the log decays, if there are any.

    With ``G = do / den`` and ``h = -(do . o) / den``::

        dphi_q = tril([G, h] [v, 1]^T) phi_k + [G, h] [S, z]^T
        dphi_k = tril([G, h] [v, 1]^T)^T phi_q + [v, 1] R^T,  dv = tril(phi_q phi_k^T)^T G + phi_k R[:, :V]

    where R is the sum of ``phi_q^T [G, h]`` over the later chunks, plus the gradient of the final state. Where sums
    fade, so does R, and every term has the factor that it has in the forward.
    """
    call = LinearCall(*inputs)
    q, k = call.q, call.k
    dq, dk, dv, dkv0, dz0, dlog_decay = _allocate_gradients(do, dkv, dz, o, den, *inputs)
    inverse = den.reciprocal()
    h = upcast(do).mul(upcast(o)).sum(-1).mul_(inverse).neg_()
    for state_rows, q_tokens, k_tokens in sequences(q.shape[2], k.shape[2], call.cu_seqlens):
        one = call.sequence(state_rows, q_tokens, k_tokens)
        parts, errors = walks(one), [x[:, :, q_tokens] for x in (do, h[..., None], inverse[..., None])]
        near = parts[1]
        db = None if near.log_decay is None else torch.zeros_like(near.log_decay)
        s1 = _derive_queries(one, parts, errors, dq[:, :, q_tokens], db)
        r1 = near.state(dkv[state_rows], dz[state_rows])
        if db is not None:
            # The final state fades with every token.
            db[:, :, -1:] += (r1 * s1).sum((1, 2), dtype=db.dtype).view(*db.shape[:2], 1, 1)
        _derive_keys(one, parts, errors, r1, dk[:, :, k_tokens], dv[:, :, k_tokens], db)
        if db is not None and near.log_decay is not None:
            after = db[..., 0].flip(2).cumsum(2).flip(2)
            dlog_decay[:, :, k_tokens][:, :, : after.shape[2]] = _until_reset(after, near.log_decay)
        r1 = torch.unflatten(r1, 0, (-1, k.shape[1]))
        dkv0[state_rows], dz0[state_rows] = r1[..., :-1], r1[..., -1]
    if call.key_mask is not None:
        for x in (dk, dv):
            x.masked_fill_(~call.key_mask[:, None, :, None], 0)
    return dq, dk, dv, dkv0, dz0, dlog_decay


def _derive_queries(
    one: LinearCall, parts: tuple[Walk, Walk, int], errors: Sequence[Tensor], dq: Tensor, db: Tensor | None
) -> Tensor:
    """Walk a sequence forwards: write ``dq``, add what it says of log decays to ``db``, and return the last state."""
    far, near, lead = parts
    far_errors, near_errors = ([x[:, :, part] for x in errors] for part in (slice(lead), slice(lead, None)))
    s1 = far.state(one.kv0, one.z0)
    if not one.causal:
        for span in pieces(far.k.shape[2], SPAN):
            phi_k, v1 = far.keys_and_values(span)
            s1.baddbmm_(phi_k.transpose(1, 2), v1)
    for span in pieces(lead, SPAN):
        far.derive(dq[:, :, :lead], far.q, span, torch.bmm(far.weighted(far_errors, span), s1.transpose(1, 2)))
    for span in spans(near.q.shape[2], CHUNK, SPAN):
        (phi_k, v1), g1 = near.keys_and_values(span), near.weighted(near_errors, span)
        fade, phi_q = near.fade(span), None
        before = near.before_(s1, phi_k, v1, span, fade)
        dphi = torch.bmm(g1, before.transpose(1, 2))
        if fade is not None:
            scale_(dphi, fade.read)
        dphi.baddbmm_(causal_(torch.bmm(g1, v1.transpose(1, 2)), fade), phi_k)
        if db is not None:
            phi_q = near.queries(span)
            near.add_products_(db, span, phi_q, dphi)
        near.derive(dq[:, :, lead:], near.q, span, dphi, phi_q)
    return s1


def _derive_keys(
    one: LinearCall,
    parts: tuple[Walk, Walk, int],
    errors: Sequence[Tensor],
    r1: Tensor,
    dk: Tensor,
    dv: Tensor,
    db: Tensor | None,
) -> None:
    """Walk it in reverse: write ``dk`` and ``dv``, and turn the last state's gradient R into the initial one's."""
    far, near, lead = parts
    far_errors, near_errors = ([x[:, :, part] for x in errors] for part in (slice(lead), slice(lead, None)))
    for span in reversed(spans(near.q.shape[2], CHUNK, SPAN)):
        phi_q, (phi_k, v1) = near.queries(span), near.keys_and_values(span)
        g1, fade = near.weighted(near_errors, span), near.fade(span)
        read_q = phi_q if fade is None else scaled(phi_q, fade.read)
        whole = None if fade is None else fade.whole
        after = running_(r1, torch.bmm(read_q.transpose(1, 2), g1), span.n, reverse=True, whole=whole)
        dphi, dv1 = torch.bmm(v1, after.transpose(1, 2)), torch.bmm(phi_k, after)
        if fade is not None:
            dphi.mul_(fade.kept)
            dv1.mul_(fade.kept)
        dphi.baddbmm_(causal_(torch.bmm(g1, v1.transpose(1, 2)), fade).transpose(1, 2), phi_q)
        dv1.baddbmm_(causal_(torch.bmm(phi_q, phi_k.transpose(1, 2)), fade).transpose(1, 2), g1)
        if db is not None:
            near.add_products_(db, span, phi_k, dphi, -1)
        near.derive(dk, near.k, span, dphi, phi_k)
        near.paste(dv, span, dv1[..., :-1])
    for span in pieces(lead, SPAN):
        r1.baddbmm_(far.queries(span).transpose(1, 2), far.weighted(far_errors, span))
    if one.causal:
        unread = near.k.shape[2]
        dk[:, :, unread:] = 0
        dv[:, :, unread:] = 0
        return
    for span in pieces(far.k.shape[2], SPAN):
        phi_k, v1 = far.keys_and_values(span)
        far.derive(dk, far.k, span, torch.bmm(v1, r1.transpose(1, 2)), phi_k)
        far.paste(dv, span, torch.bmm(phi_k, r1)[..., :-1])


def _until_reset(after: Tensor, log_decay: Tensor) -> Tensor:
    """Return sums ``[B, HKV, T]`` over all tokens from each one on without those from the next reset on, 0 at resets.

    There they are 0 but for what was rounded, which would be all that is left of small gradients before large ones.
    """
    places = torch.arange(after.shape[2], device=after.device)
    places = places.where(log_decay[..., 0] <= LEAST_LOG_DECAY, after.shape[2])
    following = places.flip(2).cummin(2).values.flip(2)
    return after - F.pad(after, (0, 1)).gather(2, following)


def _allocate_gradients(
    do: Tensor, dkv: Tensor, dz: Tensor, o: Tensor, den: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = LinearCall(*inputs)
    dq, dk, dv = (empty_like_tokens(x, x.shape[3]) for x in call[:3])
    # Empty where there are no log decays: an op of a graph returns tensors.
    g = call.log_decay
    dg = call.q.new_empty(0) if g is None else torch.zeros_like(g, memory_format=torch.contiguous_format)
    return dq, dk, dv, torch.empty_like(dkv), torch.empty_like(dz), dg


chunked_backward = operator(
    "chunked_backward",
    _gradients,
    _allocate_gradients,
    schema=f"(Tensor do, Tensor dkv, Tensor dz, Tensor o, Tensor den, {INPUTS}) -> ({', '.join(['Tensor'] * 6)})",
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.phi, ctx.causal, ctx.delay, ctx.eps = inputs
    ctx.save_for_backward(*output[:2], *tensors)


def _backward(ctx: Any, do: Tensor, dden: Tensor | None, dkv: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    # Unpacked once: under activation checkpointing every access recomputes the forward, and a second one is refused.
    saved = ctx.saved_tensors
    has_state, has_decay = saved[-2] is not None, saved[-1] is not None
    with torch.autocast(do.device.type, enabled=False):
        found = chunked_backward(do, dkv, dz, *saved, ctx.phi, ctx.causal, ctx.delay, ctx.eps)
    dq, dk, dv, dkv0, dz0, dlog_decay = found
    of_state = (dkv0, dz0) if has_state else (None, None)
    return dq, dk, dv, None, None, *of_state, dlog_decay if has_decay else None, None, None, None, None


torch.library.register_autograd(chunked_forward, _backward, setup_context=_save)
refuse_transforms("torch", chunked_forward, backward=chunked_backward)
