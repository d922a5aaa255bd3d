"""The PyTorch backend: a walk over chunks that carries the state, with a backward of its own.

Within a chunk of C tokens the quadratic form is used, across chunks the state::

    o_c = (tril(phi(q_c) phi(k_c)^T) [v_c, 1] + phi(q_c) [S, z]),  [S, z] += phi(k_c)^T [v_c, 1]

so the normaliser is one more column of the values. The backward walks twice, forwards for dq and in reverse for
dk and dv; each recomputes features and states, so that memory stays O(T (D + V)): nothing of size ``[T, C]`` or
``[T / C, F, V]`` is ever kept (keeping each chunk's state is bound by memory traffic and three times slower).
All sums are fp32, fp64 for fp64 input.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.feature_maps.elementwise import ElementwiseMap, elementwise_map
from hf_linear_attn.ops.reference import guarded
from hf_linear_attn.ops.state import LinearAttentionState, empty_like_tokens

CHUNK = 64
"""Tokens per chunk; on CPUs 64 takes a sixth less time than 128 and half that of 256 (D = V = 64, fp32)."""


def linear_attention_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: str,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: LinearAttentionState | None,
    delay: int,
    eps: float,
) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention chunk by chunk; arguments as in :func:`linear_attention_reference`."""
    kv0, z0 = (None, None) if state is None else state
    o, _, kv, z = chunked_forward(q, k, v, key_mask, cu_seqlens, kv0, z0, phi, causal, delay, eps)
    return o, LinearAttentionState(kv, z)


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Yield, per independent sequence, rows and tokens of q, then rows of its state and tokens of k."""
    if cu_seqlens is None:
        yield slice(None), slice(0, q.shape[2]), slice(None), slice(0, k.shape[2])
        return
    bounds = cu_seqlens.tolist()
    for n, (a, b) in enumerate(pairwise(bounds)):
        yield slice(None), slice(a, b), slice(n, n + 1), slice(a, b)


class _Walk:
    """The tensors of one sequence (or one padded batch), cut into chunks on demand."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, phi: ElementwiseMap, delay: int
    ) -> None:
        self.q, self.k, self.v, self.mask, self.phi, self.delay = q, k, v, key_mask, phi, delay
        self.rows = k.shape[0] * k.shape[1]
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def queries(self, a: int, b: int) -> Tensor:
        """Return phi(q) of tokens [a, b) as ``[B HKV, G C, F]``: the heads of a group share their keys."""
        return self.phi.phi(self.q[:, :, a:b]).reshape(self.rows, -1, self.q.shape[3])

    def keys(self, a: int, b: int) -> Tensor:
        """Return phi(k) of tokens [a, b), masked, as ``[B HKV, C, F]``."""
        phi_k = self.phi.phi(self.k[:, :, a:b])
        if self.mask is not None:
            phi_k = phi_k * self.mask[:, None, a:b, None]
        return phi_k.reshape(self.rows, b - a, self.k.shape[3])

    def values(self, a: int, b: int) -> Tensor:
        """Return [v, 1] of tokens [a, b) as ``[B HKV, C, V + 1]``."""
        v = self.v[:, :, a:b]
        v1 = torch.empty(self.rows, b - a, v.shape[3] + 1, dtype=self.dtype, device=v.device)
        v1.view(*v.shape[:3], -1)[..., :-1] = v
        v1[..., -1] = 1
        return v1

    def weighted(self, do: Tensor, h: Tensor, inverse: Tensor, a: int, b: int) -> Tensor:
        """Return [G, h] of tokens [a, b) as ``[B HKV, G C, V + 1]``, G = do / den."""
        g1 = torch.empty(*do.shape[:2], b - a, do.shape[3] + 1, dtype=self.dtype, device=do.device)
        torch.mul(do[:, :, a:b], inverse[:, :, a:b, None], out=g1[..., :-1])
        g1[..., -1] = h[:, :, a:b]
        return g1.view(self.rows, -1, g1.shape[-1])

    def lagged(self, a: int, b: int) -> tuple[int, int]:
        """Return the range of keys that comes into sight of queries [a, b)."""
        return max(a - self.delay, 0), max(b - self.delay, 0)

    def causal_(self, scores: Tensor, a: int, b: int) -> Tensor:
        """Zero the scores ``[B HKV, G C, C']`` of keys that a query cannot see yet, in place."""
        lo, hi = self.lagged(a, b)
        scores.view(self.rows, -1, b - a, hi - lo).tril_(a - self.delay - lo)
        return scores

    def initial(self, kv: Tensor | None, z: Tensor | None) -> Tensor:
        """Return [S, z] as ``[B HKV, F, V + 1]``, zeros where there is none; always a new tensor."""
        if kv is None or z is None:
            shape = (self.rows, self.k.shape[3], self.v.shape[3] + 1)
            return torch.zeros(shape, dtype=self.dtype, device=self.k.device)
        return torch.cat([kv, z[..., None]], dim=-1).reshape(self.rows, *kv.shape[2:-1], kv.shape[3] + 1)


def _chunks(tokens: int) -> list[tuple[int, int]]:
    return [(a, min(a + CHUNK, tokens)) for a in range(0, tokens, CHUNK)]


@torch.library.custom_op("hf_linear_attn::chunked_forward", mutates_args=())
def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kv0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    causal: bool,
    delay: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``o [B, H, T, V]``, the guarded normaliser ``[B, H, T]``, and the final ``kv`` and ``z``."""
    feature_map = elementwise_map(phi)
    o, den, kv, z = _allocate(q, k, v, cu_seqlens)
    for rows, q_tokens, state_rows, k_tokens in _sequences(q, k, v, key_mask, cu_seqlens):
        walk = _Walk(
            q[rows, :, q_tokens],
            k[rows, :, k_tokens],
            v[rows, :, k_tokens],
            None if key_mask is None else key_mask[rows, k_tokens],
            feature_map,
            delay,
        )
        s1 = walk.initial(None if kv0 is None else kv0[state_rows], None if z0 is None else z0[state_rows])
        o_rows, den_rows = o[rows, :, q_tokens], den[rows, :, q_tokens]
        if not causal:
            for a, b in _chunks(walk.k.shape[2]):
                s1.baddbmm_(walk.keys(a, b).transpose(1, 2), walk.values(a, b))
        for a, b in _chunks(walk.q.shape[2]):
            phi_q = walk.queries(a, b)
            o1 = torch.bmm(phi_q, s1)
            lo, hi = walk.lagged(a, b)
            if causal and hi > lo:
                phi_k, v1 = walk.keys(lo, hi), walk.values(lo, hi)
                o1.baddbmm_(walk.causal_(torch.bmm(phi_q, phi_k.transpose(1, 2)), a, b), v1)
                s1.baddbmm_(phi_k.transpose(1, 2), v1)
            o1 = o1.view(*q.shape[:2] if cu_seqlens is None else (1, q.shape[1]), b - a, -1)
            d = o1[..., -1]
            d = d + eps if feature_map.non_negative else guarded(d, eps)
            den_rows[:, :, a:b] = d
            torch.div(o1[..., :-1], d[..., None], out=o_rows[:, :, a:b])
        s1 = s1.view(-1, k.shape[1], *s1.shape[1:])
        kv[state_rows], z[state_rows] = s1[..., :-1], s1[..., -1]
    return o, den, kv, z


def _allocate(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    den = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    kv = torch.empty(rows, k.shape[1], k.shape[3], v.shape[3], dtype=dtype, device=q.device)
    z = torch.empty(rows, k.shape[1], k.shape[3], dtype=dtype, device=q.device)
    return empty_like_tokens(q, v.shape[3]), den, kv, z


@chunked_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kv0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    causal: bool,
    delay: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _allocate(q, k, v, cu_seqlens)


@torch.library.custom_op("hf_linear_attn::chunked_backward", mutates_args=())
def chunked_backward(
    do: Tensor,
    dkv: Tensor,
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    den: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kv0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    causal: bool,
    delay: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the initial ``kv`` and ``z``.

    With ``G = do / den`` and ``h = -(do . o) / den``::

        dphi_q = tril([G, h] [v, 1]^T) phi_k + [G, h] [S, z]^T
        dphi_k = tril([G, h] [v, 1]^T)^T phi_q + [v, 1] R^T,  dv = tril(phi_q phi_k^T)^T G + phi_k R[:, :V]

    where R is the sum of ``phi_q^T [G, h]`` over the later chunks, plus the gradient of the final state.
    """
    feature_map = elementwise_map(phi)
    dq, dk, dv = empty_like_tokens(q, q.shape[3]), empty_like_tokens(k, k.shape[3]), empty_like_tokens(v, v.shape[3])
    dkv0, dz0 = torch.empty_like(dkv), torch.empty_like(dz)
    inverse = den.reciprocal()
    h = upcast(do).mul(upcast(o)).sum(-1).mul_(inverse).neg_()
    for rows, q_tokens, state_rows, k_tokens in _sequences(q, k, v, key_mask, cu_seqlens):
        walk = _Walk(
            q[rows, :, q_tokens],
            k[rows, :, k_tokens],
            v[rows, :, k_tokens],
            None if key_mask is None else key_mask[rows, k_tokens],
            feature_map,
            delay,
        )
        errors = do[rows, :, q_tokens], h[rows, :, q_tokens], inverse[rows, :, q_tokens]
        s1 = walk.initial(None if kv0 is None else kv0[state_rows], None if z0 is None else z0[state_rows])
        if not causal:
            for a, b in _chunks(walk.k.shape[2]):
                s1.baddbmm_(walk.keys(a, b).transpose(1, 2), walk.values(a, b))
        for a, b in _chunks(walk.q.shape[2]):
            g1 = walk.weighted(*errors, a, b)
            dphi = torch.bmm(g1, s1.transpose(1, 2))
            lo, hi = walk.lagged(a, b)
            if causal and hi > lo:
                phi_k, v1 = walk.keys(lo, hi), walk.values(lo, hi)
                dphi.baddbmm_(walk.causal_(torch.bmm(g1, v1.transpose(1, 2)), a, b), phi_k)
                s1.baddbmm_(phi_k.transpose(1, 2), v1)
            x = upcast(walk.q[:, :, a:b])
            dq[rows, :, q_tokens][:, :, a:b] = dphi.view(x.shape).mul_(feature_map.derivative(x, feature_map.phi(x)))

        r1 = walk.initial(dkv[state_rows], dz[state_rows])
        if causal:
            tail = max(walk.k.shape[2] - delay, 0)
            dk[rows, :, k_tokens][:, :, tail:] = 0
            dv[rows, :, k_tokens][:, :, tail:] = 0
        else:
            for a, b in _chunks(walk.q.shape[2]):
                r1.baddbmm_(walk.queries(a, b).transpose(1, 2), walk.weighted(*errors, a, b))
        for a, b in reversed(_chunks(walk.q.shape[2] if causal else walk.k.shape[2])):
            lo, hi = walk.lagged(a, b) if causal else (a, b)
            if causal:
                phi_q, g1 = walk.queries(a, b), walk.weighted(*errors, a, b)
            if hi > lo:
                phi_k, v1 = walk.keys(lo, hi), walk.values(lo, hi)
                dphi, dv1 = torch.bmm(v1, r1.transpose(1, 2)), torch.bmm(phi_k, r1)
                if causal:
                    dphi.baddbmm_(walk.causal_(torch.bmm(g1, v1.transpose(1, 2)), a, b).transpose(1, 2), phi_q)
                    dv1.baddbmm_(walk.causal_(torch.bmm(phi_q, phi_k.transpose(1, 2)), a, b).transpose(1, 2), g1)
                x = upcast(walk.k[:, :, lo:hi])
                dphi, dv1 = dphi.view(x.shape), dv1.view(*x.shape[:3], -1)
                dphi.mul_(feature_map.derivative(x, phi_k.view(x.shape)))
                if walk.mask is not None:
                    dphi.mul_(walk.mask[:, None, lo:hi, None])
                dk[rows, :, k_tokens][:, :, lo:hi] = dphi
                dv[rows, :, k_tokens][:, :, lo:hi] = dv1[..., :-1]
            if causal:
                r1.baddbmm_(phi_q.transpose(1, 2), g1)
        r1 = r1.view(-1, k.shape[1], *r1.shape[1:])
        dkv0[state_rows], dz0[state_rows] = r1[..., :-1], r1[..., -1]
    return dq, dk, dv, dkv0, dz0


@chunked_backward.register_fake
def _(
    do: Tensor,
    dkv: Tensor,
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    den: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kv0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    causal: bool,
    delay: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        empty_like_tokens(q, q.shape[3]),
        empty_like_tokens(k, k.shape[3]),
        empty_like_tokens(v, v.shape[3]),
        torch.empty_like(dkv),
        torch.empty_like(dz),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, cu_seqlens, kv0, z0, ctx.phi, ctx.causal, ctx.delay, _ = inputs
    o, den, _, _ = output
    ctx.save_for_backward(q, k, v, o, den, key_mask, cu_seqlens, kv0, z0)


def _backward(ctx: Any, do: Tensor, dden: Tensor | None, dkv: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    # Unpacked once: under activation checkpointing every access recomputes the forward, and a second one is refused.
    saved = ctx.saved_tensors
    has_state = saved[-1] is not None
    with torch.autocast(do.device.type, enabled=False):
        dq, dk, dv, dkv0, dz0 = chunked_backward(do, dkv, dz, *saved, ctx.phi, ctx.causal, ctx.delay)
    return (
        dq,
        dk,
        dv,
        None,
        None,
        dkv0 if has_state else None,
        dz0 if has_state else None,
        None,
        None,
        None,
        None,
    )


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise BackendError(
        "`backend` must be 'reference' for second derivatives, got 'torch'. Its backward is not differentiable."
    )


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise BackendError(
        "`backend` must be 'reference' under vmap, got 'torch'. Make the mapped dimension part of the batch."
    )


torch.library.register_autograd(chunked_forward, _backward, setup_context=_save)
torch.library.register_autograd(chunked_backward, _refuse)
for _op in (chunked_forward, chunked_backward):
    torch.library.register_vmap(_op, _refuse_vmap)
