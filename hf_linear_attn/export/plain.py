"""The package's operations in ordinary operators, for texts of any length: what takes their place in an exported graph.

A graph for every length has no walk over chunks, whose number depends on the length. All pairs of the tokens of one
call are scored at once, so that memory grows with the square of a call's tokens and not at all with the context: long
prompts are read in pieces. The delta rule, in which each key needs the state that the one before it left, and the
choice of kept keys, which needs the keys that were kept before, are scans over tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.delta_rule.problem import DeltaCall
from hf_linear_attn.ops.delta_rule.reference import unit
from hf_linear_attn.ops.kept.problem import Entering
from hf_linear_attn.ops.kept.torch import Leaving, Places, closed, opened, take
from hf_linear_attn.ops.linear_attention.problem import LinearCall
from hf_linear_attn.ops.linear_attention.reference import guarded
from hf_linear_attn.ops.window.problem import WindowCall

STANDARD_OPSET = 27
"""Version of ONNX's operators from which on LinearAttention is one."""
UNTIL_CONVERTED = "hf_linear_attn"
"""Its domain until the graph has that version: what converts a graph knows no way for it."""


def by_standard(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Read tokens by ONNX's LinearAttention.

    Args:
        q: Features of queries ``[B, HKV, G, T, F]``.
        k: Those of keys ``[B, HKV, T, F]``.
        v: Values ``[B, HKV, T, V]``.
        state: What was read before ``[B, HKV, F, V]``.
        log_decay: By which it fades ``[B, HKV, T]``, or None.
        beta: The delta rule's rates ``[B, HKV, T]``, or None.

    Returns:
        ``[B, HKV, G, T, V]`` and the state after them.
    """
    rows, heads, group, tokens, _ = q.shape
    rule = {(0, 0): "linear", (1, 0): "gated", (0, 1): "delta", (1, 1): "gated_delta"}
    packed = [x.transpose(1, 2).flatten(2) for x in (q.flatten(1, 2), k, v)]
    gates = [None if x is None else x.mT.contiguous() for x in (log_decay, beta)]
    o, state = torch.onnx.ops.symbolic_multi_out(
        f"{UNTIL_CONVERTED}::LinearAttention",
        (*packed, state, *gates),
        {
            "q_num_heads": heads * group,
            "kv_num_heads": heads,
            "scale": 1.0,
            "update_rule": rule[log_decay is not None, beta is not None],
        },
        dtypes=(v.dtype, v.dtype),
        shapes=((rows, tokens, heads * group * v.shape[3]), state.shape),
        version=1,
    )
    return torch.unflatten(o, 2, (heads, group, -1)).movedim(1, 3), state


def by_pairs(q: Tensor, k: Tensor, v: Tensor, before: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Do what :func:`by_standard` does without the delta rule, in ordinary operators."""
    scores = q @ k[:, :, None].mT
    kept, read, state = k, q, before
    if log_decay is not None:
        # Differences of sums over many tokens: in less than fp64 they would lose what follows a strong decay.
        b = log_decay.double().cumsum(-1)
        scores = scores * (b[..., None] - b[..., None, :]).clamp(max=0).exp().to(v.dtype)[:, :, None]
        read = q * b.exp().to(v.dtype)[:, :, None, :, None]
        kept = k * (b[..., -1:] - b).exp().to(v.dtype)[..., None]
        state = before * b[..., -1:].exp().to(v.dtype)[..., None]
    return scores.tril() @ v[:, :, None] + read @ before[:, :, None], state + kept.mT @ v


def linear(*inputs: Any, standard: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``hf_linear_attn::chunked_forward``: o, the guarded normaliser, and the final ``kv`` and ``z``."""
    call = LinearCall(*inputs)
    _refuse(call.delay, call.cu_seqlens, causal=call.causal)
    phi = elementwise_map(call.phi)
    phi_q, phi_k, v = grouped(phi.phi(upcast(call.q)), call.k.shape[1]), phi.phi(upcast(call.k)), upcast(call.v)
    if call.key_mask is not None:
        phi_k = phi_k * call.key_mask[:, None, :, None]
    # The normaliser is one more column of the values.
    v1 = F.pad(v, (0, 1), value=1.0)
    rows, heads, _, width = phi_k.shape
    before = phi_k.new_zeros(rows, heads, width, v1.shape[3])
    if call.kv0 is not None and call.z0 is not None:
        before = torch.cat([call.kv0, call.z0[..., None]], -1)
    log_decay = None if call.log_decay is None else upcast(call.log_decay)
    o1, state = (by_standard if standard else by_pairs)(phi_q, phi_k, v1, before, log_decay)
    den = o1[..., -1:] + call.eps if phi.non_negative else guarded(o1[..., -1:], call.eps)
    o = (o1[..., :-1] / den).flatten(1, 2).to(call.q.dtype)
    return o, den[..., 0].flatten(1, 2), state[..., :-1].clone(), state[..., -1].clone()


def window(*inputs: Any) -> Tensor:
    """Compute ``hf_linear_attn::window_forward``: softmax over a window, the sinks and a key of each query's own."""
    call = WindowCall.of(*inputs)
    scores, v = _scores(call)
    if call.own is None:
        o = scores.softmax(-1) @ v
    else:
        own_score, own_seen, own_value = call.own
        own = grouped(upcast(own_score), call.k.shape[1])
        own = torch.where(own_seen[:, None, None], own, torch.finfo(own.dtype).min)[..., None]
        shares = torch.cat([scores, own], -1).softmax(-1)
        o = shares[..., :-1] @ v + shares[..., -1:] * grouped(upcast(own_value), call.k.shape[1])
    return o.flatten(1, 2).to(call.v.dtype)


def window_sums(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute ``hf_linear_attn::sums_forward``: what softmax over the window and the sinks divides."""
    scores, v = _scores(WindowCall.of(*inputs))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights @ v).flatten(1, 2), weights.sum(-1).flatten(1, 2)


def _scores(call: WindowCall) -> tuple[Tensor, Tensor]:
    """Return the scores of all keys ``[B, HKV, G, T, *]``, least where hidden, and their values; first kept ones."""
    q, k, v = call.q, call.k, upcast(call.v)
    queries, keys = q.shape[2], k.shape[2]
    i = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
    j = torch.arange(keys, device=q.device)[None]
    visible = ((j <= i) & (j > i - call.window))[None]
    if call.key_mask is not None:
        visible = (visible & call.key_mask[:, None]) | (j == i)
    if call.sinks is not None:
        sink_k, sink_v, seen = call.sinks
        k, v = torch.cat([sink_k.to(k.dtype), k], 2), torch.cat([sink_v.to(v.dtype), v], 2)
        visible = torch.cat([seen, visible.expand(seen.shape[0], -1, -1)], -1)
    visible = visible[:, None]
    if call.kept is not None:
        kept, i = call.kept, torch.arange(queries, device=q.device)[:, None]
        k, v = torch.cat([kept.k.to(k.dtype), k], 2), torch.cat([kept.v.to(v.dtype), v], 2)
        seen = (kept.begins[:, None, None] <= i) & (i < kept.ends[:, :, None])
        visible = torch.cat([seen, visible.expand(*seen.shape[:2], -1, -1)], -1)
    scores = upcast(grouped(q, k.shape[1]) @ k[:, :, None].mT) * call.scaling
    return torch.where(visible[:, :, None], scores, torch.finfo(scores.dtype).min), v[:, :, None]


def delta(*inputs: Any, standard: bool) -> tuple[Tensor, Tensor]:
    """Compute ``hf_linear_attn::delta_forward``: o and the final ``kv``."""
    call = DeltaCall(*inputs)
    _refuse(call.delay, call.cu_seqlens)
    q, k, v, beta = grouped(upcast(call.q), call.k.shape[1]), upcast(call.k), upcast(call.v), upcast(call.beta)
    log_decay = None if call.log_decay is None else upcast(call.log_decay)
    if call.l2norm:
        q, k = unit(q), unit(k)
    if call.key_mask is not None:
        real = call.key_mask[:, None]
        k, v = k * real[..., None], v * real[..., None]
        beta, log_decay = beta * real, None if log_decay is None else log_decay.masked_fill(~real, 0)
    start = call.kv0 if call.kv0 is not None else k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    if standard:
        o, state = by_standard(q, k, v, start, log_decay, beta)
        return o.flatten(1, 2).to(call.q.dtype), state
    decay = torch.ones_like(beta) if log_decay is None else log_decay.exp()

    def take(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q_t, k_t, v_t, beta_t, decay_t = token
        state = state * decay_t
        missing = v_t - torch.bmm(k_t, state)
        state = state + torch.bmm(k_t.mT, beta_t * missing)
        return state, torch.bmm(q_t, state)

    # Tokens first; what one brings to a head of a row is a matrix: of one line, but for the queries of a group.
    tokens = (q.movedim(3, 0), *(x.movedim(2, 0)[..., None, :] for x in (k, v, beta[..., None], decay[..., None])))
    state, o = scan(take, start.flatten(0, 1), tuple(x.flatten(1, 2).contiguous() for x in tokens))
    o = torch.unflatten(o, 1, k.shape[:2]).movedim(0, 3).flatten(1, 2)
    return o.to(call.q.dtype), torch.unflatten(state, 0, k.shape[:2])


def choose_kept(*inputs: Any) -> tuple[Tensor, ...]:
    """Compute ``hf_linear_attn::choose_kept``, the last input of which is a backend."""
    call = Entering(*inputs[:-1])
    begun, keys = opened(call)

    def step(places: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        then, slot, gone = take(Places(*places), Leaving(*key), call.window)
        return _there(then), (slot[..., 0], gone[..., 0])

    places, chosen = scan(step, _there(begun), tuple(x.contiguous() for x in keys))
    slot, gone = (x.movedim(0, 2) for x in chosen)
    return closed(call, Places(*places), slot, gone)


def _there(places: Places) -> tuple[Tensor, ...]:
    """Return the tensors of places as a scan hands them on, the last left out where there is none."""
    return tuple(x.contiguous() for x in places if x is not None)


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """View ``x [B, H, ...]`` as ``[B, HKV, G, ...]``, the heads that share keys side by side."""
    return torch.unflatten(x, 1, (kv_heads, -1))


def _refuse(delay: Any, cu_seqlens: Tensor | None, *, causal: bool = True) -> None:
    """Raise for what a model that is read with states never asks for."""
    if delay != 0 or cu_seqlens is not None or not causal:
        raise UnsupportedError(
            "model",
            "attend causally, in texts that are not packed",
            {"delay": str(delay), "packed": cu_seqlens is not None, "causal": causal},
            "Export a causal language model.",
        )


def plain_forms(*, standard: bool) -> dict[Any, Callable[..., Any]]:
    """Return the ordinary form of each of the package's operators.

    Args:
        standard: Read states by ONNX's LinearAttention, which PyTorch cannot run.
    """
    ours = torch.ops.hf_linear_attn
    return {
        ours.chunked_forward.default: partial(linear, standard=standard),
        ours.window_forward.default: window,
        ours.sums_forward.default: window_sums,
        ours.delta_forward.default: partial(delta, standard=standard),
        ours.choose_kept.default: choose_kept,
    }
