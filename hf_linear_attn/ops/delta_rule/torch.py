"""The PyTorch backend: a walk over chunks that carries the state, with a backward of its own.

With b the sum of log decays up to a token of its chunk, ``G_ij = exp(b_i - b_j)`` and ``E = exp(b)``, a chunk of C
tokens reads what each of its keys gives before it is overwritten, and so finds what it writes there::

    T  = (I + strict_tril(diag(beta) K K^T * G))^-1 diag(beta)
    N  = T (V - E K S)
    O  = E Q S + tril(Q K^T * G) N
    S' = exp(b_C) S + (exp(b_C - b) K)^T N

(Yang et al., 2024, arXiv:2406.06484 and arXiv:2412.06464). A span of a few chunks goes through one batched product
each, but for the two that carry the state. Sums are fp32, fp64 for fp64 input; of log decays they are fp64, since
differences of them are what counts.

The backward walks forwards once more, keeps the state before each span, and comes back. Per chunk, with dS' from the
later ones::

    dN = tril(Q K^T * G)^T dO + (exp(b_C - b) K) dS',   Z = (I + ...)^-T dN,   dV = beta Z
    dS = exp(b_C) dS' + (E Q)^T dO - (E K)^T dV
    dQ = tril(dO N^T * G) K + E dO S^T
    dK = X K + X^T K - E dV S^T + tril(dO N^T * G)^T Q + exp(b_C - b) N dS'^T,   X = -strict_tril(dV N^T * G)

and beta gets ``Z . (V - E K S - strict_tril(K K^T * G) N)``. A log decay fades whatever a later token reads of an
earlier one: its gradient is a sum over the pairs on both sides of it, the state before the chunk on one side and the
gradient of the state after it on the other. It is summed as that and not as ``q . dq - k . dk``, which is the same in
exact numbers and cancels where decays are strong.

A delay shifts keys against queries: the first queries read the initial state alone, the last keys are never read, and
in between query t meets key t - delay, as without one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.chunks import LEAST_LOG_DECAY, Span, pieces, sequences, spans
from hf_linear_attn.ops.delta_rule.problem import FORWARD, GRADIENTS, DeltaCall
from hf_linear_attn.ops.delta_rule.reference import NORM_EPS
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.library import operator, own_precision, refuse_functional, refuse_transforms
from hf_linear_attn.ops.state import empty_like_tokens

CHUNK = 32
"""Tokens per chunk; on CPUs 64 takes a quarter more time (F = V = 64, fp32): the inverse is of its square."""

SPAN = 128
"""Tokens per span; so many that calls are few, so few that a span stays in a core's cache."""


def delta_rule_chunked(call: DeltaCall) -> tuple[Tensor, DeltaRuleState]:
    """Compute the delta rule chunk by chunk."""
    refuse_functional("torch", call.q, call.k, call.v, call.beta, call.log_decay, call.kv0)
    o, kv = delta_forward(*call)
    return o, DeltaRuleState(kv)


class _Tokens(NamedTuple):
    """The tokens of one sequence, or of one padded batch, queries beside the last key that each sees.

    Shapes are those of a :class:`DeltaCall`; gates and mask are ``[B, HKV, T, 1]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    mask: Tensor | None
    l2norm: bool

    def cut(self, x: Tensor, span: Span) -> Tensor:
        """View a span's tokens of ``x [B, heads, T, E]`` as ``[n, B, HKV, G, C, E]``."""
        of_span = torch.unflatten(x[:, :, span.a : span.b], 2, (span.n, -1))
        heads = torch.unflatten(of_span, 1, (self.k.shape[1], -1))
        return heads.permute(3, 0, 1, 2, 4, 5)

    def rows(self, x: Tensor, span: Span) -> Tensor:
        """Return a span's tokens of ``x`` as ``[n, B HKV, G C, E]``, in the dtype of sums."""
        x = upcast(self.cut(x, span))
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3] * x.shape[4], x.shape[5])

    def keys(self, x: Tensor, span: Span) -> Tensor:
        """Return what belongs to a span's keys likewise, zero where a key does not count."""
        rows = self.rows(x, span)
        if self.mask is None:
            return rows
        return torch.where(self.rows(self.mask, span) != 0, rows, rows.new_zeros(()))

    def paste(self, x: Tensor, span: Span, y: Tensor) -> None:
        """Write rows over a span's tokens of ``x``."""
        to = self.cut(x, span)
        to.copy_(y.reshape(to.shape))

    def unit(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return rows divided by their lengths, and what they were multiplied by."""
        if not self.l2norm:
            return x, None
        scale = x.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
        return x * scale, scale


def _unit_gradient(dx: Tensor, x: Tensor, scale: Tensor | None) -> Tensor:
    """Return the gradient of rows, given that of ``x``, the same divided by their lengths."""
    return dx if scale is None else (dx - x * (x * dx).sum(-1, keepdim=True)).mul_(scale)


class _Span:
    """What a span is made of and what the chunk form makes of it; ``[n, rows, ...]`` with rows = B HKV."""

    def __init__(self, tokens: _Tokens, span: Span) -> None:
        self.k, self.k_scale = tokens.unit(tokens.keys(tokens.k, span))
        self.v, self.beta = tokens.keys(tokens.v, span), tokens.keys(tokens.beta, span)
        self.within: Tensor | None = None
        self.before = self.after = self.whole = self.beta.new_ones(())
        kk = self.k @ self.k.mT
        if tokens.log_decay is not None:
            g = tokens.keys(tokens.log_decay, span).double().clamp(min=LEAST_LOG_DECAY)
            b = g.cumsum(2)
            later = torch.ones(b.shape[2], b.shape[2], dtype=torch.bool, device=b.device).triu_(1)
            self.within = (b - b.mT).masked_fill_(later, -torch.inf).to(kk.dtype).exp_()
            self.before, self.after = b.exp().to(kk.dtype), (b[:, :, -1:] - b).exp_().to(kk.dtype)
            self.whole = self.before[:, :, -1:]
            kk = kk * self.within
        self.kk = kk.tril_(-1)
        self.inverse = torch.linalg.solve_triangular(
            kk * self.beta, torch.eye(kk.shape[2], dtype=kk.dtype, device=kk.device), upper=False, unitriangular=True
        )
        self.k_reading, self.k_read = self.k * self.before, self.k * self.after

    def causal_(self, scores: Tensor) -> Tensor:
        """Weigh the scores ``[n, rows, G C, C]`` of a span's keys, zero where a query cannot see them, in place."""
        by_head = torch.unflatten(scores, 2, (-1, scores.shape[3]))
        if self.within is None:
            by_head.tril_()
        else:
            by_head.mul_(self.within[:, :, None])
        return scores

    def walk(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take the span's keys into ``state [rows, F, V]``, in place.

        Returns:
            The state before each chunk, what a chunk's keys add to what they read from it, and what they write.
        """
        n, rows, _, dim = self.k.shape
        transition = self.inverse * self.beta.mT
        states = self.k.new_empty(n, rows, dim, self.v.shape[3])
        missing, written = torch.empty_like(self.v), torch.empty_like(self.v)
        whole = self.whole.expand(n, rows, 1, 1) if self.within is not None else None
        for i in range(n):
            states[i] = state
            torch.baddbmm(self.v[i], self.k_reading[i], state, alpha=-1, out=missing[i])
            torch.bmm(transition[i], missing[i], out=written[i])
            if whole is not None:
                state.mul_(whole[i])
            state.baddbmm_(self.k_read[i].mT, written[i])
        return states, missing, written


def _tokens(call: DeltaCall, at: slice, lead: int) -> _Tokens:
    """Put the queries of a sequence beside the last key that each sees; the first ``lead`` see none."""
    q, k, v, beta = call.q, call.k, call.v, call.beta
    near, later = slice(at.start, at.stop - lead), slice(at.start + lead, at.stop)
    mask = None if call.key_mask is None else call.key_mask[:, None, near, None].expand(-1, k.shape[1], -1, -1)
    gate = None if call.log_decay is None else call.log_decay[:, :, near, None]
    return _Tokens(q[:, :, later], k[:, :, near], v[:, :, near], beta[:, :, near, None], gate, mask, call.l2norm)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return ``o [B, H, T, V]`` and the final ``kv``."""
    call = DeltaCall(*inputs)
    q, kv0 = call.q, call.kv0
    o, kv = _allocate(call)
    for rows, at, _ in sequences(q.shape[2], q.shape[2], call.cu_seqlens):
        lead = min(call.delay, at.stop - at.start)
        tokens = _tokens(call, at, lead)
        state = _start(kv, None if kv0 is None else kv0[rows], rows)
        far, o_far, o_near = q[:, :, at][:, :, :lead], o[:, :, at][:, :, :lead], o[:, :, at][:, :, lead:]
        for span in pieces(lead, SPAN):
            tokens.paste(o_far, span, tokens.unit(tokens.rows(far, span))[0] @ state)
        for span in spans(tokens.q.shape[2], CHUNK, SPAN):
            parts, x = _Span(tokens, span), tokens.unit(tokens.rows(tokens.q, span))[0]
            states, _, written = parts.walk(state)
            scores = parts.causal_(x @ parts.k.mT)
            tokens.paste(o_near, span, _faded(x, parts) @ states + scores @ written)
        kv[rows] = state.view(-1, *kv.shape[1:])
    return o, kv


def _faded(x: Tensor, parts: _Span) -> Tensor:
    """Multiply queries, or gradients of outputs, by what their tokens have left of the state before the chunk."""
    if parts.within is None:
        return x
    by_head = torch.unflatten(x, 2, (-1, parts.k.shape[2]))
    return (by_head * parts.before[:, :, None]).view_as(x)


def _start(kv: Tensor, kv0: Tensor | None, rows: slice) -> Tensor:
    """Return a new state ``[rows HKV, F, V]``, zeros where there is none to start from."""
    return (torch.zeros_like(kv[rows]) if kv0 is None else kv0.clone()).flatten(0, 1)


def _allocate(call: DeltaCall) -> tuple[Tensor, Tensor]:
    q, k, v = call.q, call.k, call.v
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv = torch.empty(call.rows, k.shape[1], k.shape[3], v.shape[3], dtype=dtype, device=q.device)
    return empty_like_tokens(q, v.shape[3]), kv


delta_forward = operator("delta_forward", _forward, lambda *inputs: _allocate(DeltaCall(*inputs)), schema=FORWARD)


def _gradients(do: Tensor, dkv: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log decay (of nothing where there is none) and of the initial ``kv``."""
    call = DeltaCall(*inputs)
    q, kv0 = call.q, call.kv0
    dq, dk, dv, dbeta, dg, dkv0 = _allocate_gradients(do, dkv, *inputs)
    for rows, at, _ in sequences(q.shape[2], q.shape[2], call.cu_seqlens):
        lead = min(call.delay, at.stop - at.start)
        tokens = _tokens(call, at, lead)
        near = slice(at.start, at.stop - lead)
        unread = slice(near.stop, at.stop)
        for x in (dk, dv, dbeta, dg):
            x[:, :, unread] = 0
        out = [x[:, :, near] for x in (dk, dv, dbeta[..., None], dg[..., None])]
        far, dq_far, dq_near = q[:, :, at][:, :, :lead], dq[:, :, at][:, :, :lead], dq[:, :, at][:, :, lead:]
        do_far, do_near = do[:, :, at][:, :, :lead], do[:, :, at][:, :, lead:]

        start = _start(dkv, None if kv0 is None else kv0[rows], rows)
        state, starts = start.clone(), []
        cuts = spans(tokens.q.shape[2], CHUNK, SPAN)
        for span in cuts:
            starts.append(state.clone())
            _Span(tokens, span).walk(state)

        ds = dkv[rows].clone().flatten(0, 1)
        for span, before in zip(reversed(cuts), reversed(starts), strict=True):
            found = _span_backward(tokens, span, before, ds, tokens.rows(do_near, span))
            for x, dx in zip((dq_near, *out), found, strict=True):
                if dx is not None:
                    tokens.paste(x, span, dx)
        for span in pieces(lead, SPAN):
            x, scale = tokens.unit(tokens.rows(far, span))
            do_rows = tokens.rows(do_far, span)
            tokens.paste(dq_far, span, _unit_gradient(do_rows @ start.mT, x, scale))
            ds += (x.mT @ do_rows)[0]
        dkv0[rows] = ds.view(-1, *dkv.shape[1:])
    return dq, dk, dv, dbeta, dg, dkv0


def _span_backward(
    tokens: _Tokens, span: Span, before: Tensor, ds: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of a span's q, k, v, beta and log decay, of those of its outputs ``do [n, rows, G C, V]``.

    The state before it ``[rows, F, V]`` is spoilt; ``ds``, that of the state after it, becomes that of ``before``.
    """
    parts = _Span(tokens, span)
    q, q_scale = tokens.unit(tokens.rows(tokens.q, span))
    k = parts.k
    states, missing, written = parts.walk(before)
    do_faded = _faded(do, parts)

    # Backwards through the chunks: what each key's value gets, and the gradient of the state after each chunk.
    scores = parts.causal_(q @ k.mT)
    dn = scores.mT @ do
    from_queries = q.mT @ do_faded
    back, later, dz = parts.inverse.mT, torch.empty_like(states), torch.empty_like(dn)
    dv = torch.empty_like(dn)
    whole = parts.whole.expand(*dn.shape[:2], 1, 1) if parts.within is not None else None
    for i in reversed(range(len(dn))):
        later[i] = ds
        torch.bmm(back[i], torch.baddbmm(dn[i], parts.k_read[i], ds), out=dz[i])
        torch.mul(dz[i], parts.beta[i], out=dv[i])
        if whole is not None:
            ds.mul_(whole[i])
        ds.add_(from_queries[i]).baddbmm_(parts.k_reading[i].mT, dv[i], alpha=-1)

    dscores, dkk = do @ written.mT, -(dv @ written.mT)
    past_q, past_k = do_faded @ states.mT, (dv * parts.before) @ states.mT
    future_k = (written * parts.after) @ later.mT
    dg = None
    if parts.within is not None:
        pairs = torch.unflatten(scores.mul_(dscores), 2, (-1, k.shape[2])).sum(2).addcmul_(parts.kk, dkk)
        heads = torch.unflatten((q * past_q).sum(-1, keepdim=True), 2, (-1, k.shape[2])).sum(2)
        reading = heads - (k * past_k).sum(-1, keepdim=True)
        read = (k * future_k).sum(-1, keepdim=True)
        dg = (pairs.flip(2).cumsum(2).flip(2).tril_(-1)).sum(-1, keepdim=True)
        dg += reading.flip(2).cumsum(2).flip(2) + read.cumsum(2) - read
        dg += parts.whole * (later * states).sum((-1, -2), keepdim=True)
        dkk.mul_(parts.within)
    dkk, dscores = dkk.tril_(-1), parts.causal_(dscores)
    dq = dscores @ k + past_q
    dk = dkk @ k + dkk.mT @ k + dscores.mT @ q - past_k + future_k
    dbeta = (dz * (missing - parts.kk @ written)).sum(-1, keepdim=True)
    dk = _unit_gradient(dk, k, parts.k_scale)
    if tokens.mask is not None:
        hidden = tokens.rows(tokens.mask, span) == 0
        for x in (dk, dv, dbeta, dg):
            if x is not None:
                x.masked_fill_(hidden, 0)
    return _unit_gradient(dq, q, q_scale), dk, dv, dbeta, dg


def _allocate_gradients(do: Tensor, dkv: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = DeltaCall(*inputs)
    dq, dk, dv = (empty_like_tokens(x, x.shape[3]) for x in (call.q, call.k, call.v))
    dg = torch.zeros_like(call.beta) if call.log_decay is None else torch.empty_like(call.log_decay)
    return dq, dk, dv, torch.empty_like(call.beta), dg, torch.empty_like(dkv)


delta_backward = operator("delta_backward", _gradients, _allocate_gradients, schema=GRADIENTS)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.delay, ctx.l2norm = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, do: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
    # Unpacked once: under activation checkpointing every access recomputes the forward, and a second one is refused.
    saved = ctx.saved_tensors
    with own_precision(do.device):
        dq, dk, dv, dbeta, dg, dkv0 = delta_backward(do, dkv, *saved, ctx.delay, ctx.l2norm)
    has_decay, has_state = saved[4] is not None, saved[7] is not None
    return dq, dk, dv, dbeta, dg if has_decay else None, None, None, dkv0 if has_state else None, None, None


torch.library.register_autograd(delta_forward, _backward, setup_context=_save)
refuse_transforms("torch", delta_forward, backward=delta_backward)
