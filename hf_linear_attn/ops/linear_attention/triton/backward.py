"""The backward: what it is given and returns, and which kernels of gradients it launches."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.ops.linear_attention.triton.fade import Fades, Starts, fade_back_launch, fade_launches
from hf_linear_attn.ops.linear_attention.triton.forward import (
    Forward,
    allocate_state,
    state_launch,
    summed,
)
from hf_linear_attn.ops.linear_attention.triton.gradients import (
    delta_kernel,
    dk_kernel,
    dq_kernel,
    dv_kernel,
    reverse_state_kernel,
)
from hf_linear_attn.ops.linear_attention.triton.model import Cut, choose
from hf_linear_attn.ops.linear_attention.triton.stored_gradients import stored_dkv_kernel, stored_dq_kernel
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, Tile, padded, strides, walk


class Saved(NamedTuple):
    """What the backward needs of the forward's results.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        den: Guarded normalisers ``[B, H, T]``, fp32.
        kv: Final state ``[B or N, HKV, D, V]`` where not causal.
        z: Its normaliser.
    """

    o: Tensor
    den: Tensor
    kv: Tensor | None
    z: Tensor | None


def save(p: Problem, out: Forward) -> Saved:
    """Pick what the backward needs; states that segments start from are summed anew."""
    return Saved(out.o, out.den, *((None, None) if p.causal else (out.kv, out.z)))


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    q: bool = True
    k: bool = True
    v: bool = True
    state: bool = True
    log_decay: bool = True


EVERY = Wanted()


class Backward(NamedTuple):
    """Gradients of q, k, v, of the initial state and of log decays; empty where not asked for for them."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dkv0: Tensor
    dz0: Tensor
    dlog_decay: Tensor


def allocate_backward(p: Problem, wanted: Wanted) -> Backward:
    """Allocate the gradients."""

    def tokens(x: Tensor, asked: bool) -> Tensor:
        return empty_like_tokens(x, x.shape[3]) if asked else x.new_empty(0)

    of_decay = wanted.log_decay and p.log_decay is not None
    # The walk that ends in the initial state's gradient is dk's, and log decays are found by it and by dq's.
    dk, dv = tokens(p.k, wanted.k or wanted.state or of_decay), tokens(p.v, wanted.v)
    dlog_decay = p.q.new_empty(0)
    if of_decay and p.log_decay is not None:
        dlog_decay = torch.empty(p.log_decay.shape, dtype=p.log_decay.dtype, device=p.q.device)
    state = p.rows, p.k.shape[1], p.k.shape[3]
    return Backward(
        tokens(p.q, wanted.q or of_decay),
        dk,
        dv,
        torch.empty(*state, p.v.shape[3], dtype=torch.float32, device=p.q.device),
        torch.empty(state, dtype=torch.float32, device=p.q.device),
        dlog_decay,
    )


def delta_launch(chosen: Tile, o: Tensor, do: Tensor, delta: Tensor) -> Launch:
    """Plan ``delta = do . o``."""
    (_, H, T, V), rows = o.shape, delta.numel()
    arguments = {
        **{"o": o, "do": do, "delta": delta, "rows": rows, "T": T, "H": H},
        **strides("o", o),
        **strides("do", do),
        **{"V": V, "BV": padded(V), "BT": chosen.tokens},
    }
    return Launch("delta", delta_kernel, -(-rows // chosen.tokens), arguments, chosen, (o, do), (delta,))


def reverse_state_launch(
    p: Problem, saved: Saved, do: Tensor, delta: Tensor, segments: Segments, fades: Fades
) -> Launch:
    """Plan the sums over each segment's queries, and delta."""
    q, o, den, chosen = p.q, saved.o, saved.den, p.tile("reverse_state")
    arguments = {
        **{"q": q, "o": o, "do": do, "den": den, "delta": delta, "states": p.states(segments)},
        **{"T": q.shape[2], "HKV": p.k.shape[1], "d_b": den.stride(0), "G": p.group},
        **strides("q", q),
        **strides("o", o),
        **strides("do", do),
        **{"BD": chosen.width, "BV": p.padded(p.v.shape[3]), "BT": chosen.tokens},
        **p.sizes(),
        **walk(segments),
        **fades.arguments(),
    }
    programs = segments.count * p.k.shape[1] * -(-p.k.shape[3] // chosen.width)
    return Launch("reverse_state", reverse_state_kernel, programs, arguments, chosen, (q, o, do, den), (delta,))


def backward_launches(
    p: Problem,
    saved: Saved,
    do: Tensor,
    dkv: Tensor | None,
    dz: Tensor | None,
    wanted: Wanted = EVERY,
) -> tuple[Backward, list[Launch]]:
    """Plan the backward.

    Args:
        p: The problem of the forward.
        saved: What :func:`save` kept of its results.
        do: Gradient of o.
        dkv: Gradient of the final state, fp32, contiguous, or None where the loss does not depend on it.
        dz: Gradient of its normaliser, or None likewise.
        wanted: Which gradients are asked for.

    Returns:
        The gradients, allocated but not computed, and the launches that compute them, in order.
    """
    out = allocate_backward(p, wanted)
    delta = torch.empty_like(saved.den)
    of_decay = wanted.log_decay and p.log_decay is not None
    of_keys = wanted.k or wanted.v or wanted.state or of_decay
    # What a decay changes is a product of what comes before it and of what comes after: both are cut alike.
    cut = choose(p, "dk") if p.log_decay is None else choose(p, "dq", "dk")
    segments = p.segments(p.k.shape[2], cut.length)
    fades, launches = fade_launches(p, segments)
    ends = Starts()
    seed: tuple[Tensor | None, Tensor | None] = dkv, dz
    if of_keys and (cut.stored or segments.split or not p.causal):
        summing = segments if p.causal else p.segments(p.q.shape[2], choose(p, "reverse_state").length)
        sums = reverse_state_launch(p, saved, do, delta, summing, fades)
        initial = out.dkv0, out.dz0
        ends, before = summed(p, sums, summing, seed, initial, reverse=True, stored=cut.stored, fades=fades)
        launches += before
        if not p.causal:
            seed = out.dkv0, out.dz0
    elif wanted.q or wanted.k or wanted.state or of_decay:
        launches.append(delta_launch(p.tile("delta"), saved.o, do, delta))
    shared = {
        **{"q": p.q, "k": p.k, "do": do, "den": saved.den, "T": p.q.shape[2], "d_b": saved.den.stride(0)},
        **strides("q", p.q),
        **strides("k", p.k),
        **strides("do", do),
        **p.sizes(),
        **p.keys(),
        **fades.arguments(),
    }
    errors = do, saved.den, delta
    starts, asked = Starts(), None
    if wanted.q or of_decay:
        of_queries = choose(p, "dq") if p.log_decay is None else cut
        starts, before = starts_launches(p, of_queries, fades)
        launches += before
        asked = _rows_of(p, "dq", p.q, of_queries)
        launches.append(dq_launch(p, saved, errors, out, shared, of_queries, starts, asked))
    shared |= {"S": p.k.shape[2], "HKV": p.k.shape[1], "G": p.group, **walk(segments)}
    drawn = _rows_of(p, "dk", p.k, cut)
    if of_keys and cut.stored:
        launches += stored_key_launches(p, errors, out, wanted, shared, ends, drawn)
    elif of_keys:
        shared["SOURCE"] = "segment" if ends.states is not None else "none" if seed[0] is None else "sequence"
        shared |= {"kv1": seed[0], "states": ends.states, "CAUSAL": p.causal}
        launches += key_launches(p, errors, out, wanted, shared, seed[1], segments, drawn)
    if of_decay and p.log_decay is not None and drawn is not None and asked is not None:
        initial = out.dkv0, out.dz0
        launches.append(fade_back_launch(p, p.log_decay, segments, drawn, asked, out.dlog_decay, initial, starts, ends))
    return out, launches


Errors = tuple[Tensor, Tensor, Tensor]
"""The gradient of o, the normalisers, and delta."""


def _rows_of(p: Problem, role: str, x: Tensor, cut: Cut) -> Tensor | None:
    """Allocate a number per token and tile of features ``[B, heads, tiles, T]``, where sums fade."""
    if p.log_decay is None:
        return None
    tiles = 1 if cut.stored else -(-x.shape[3] // p.tile(role).width)
    return torch.empty(*x.shape[:2], tiles, x.shape[2], dtype=torch.float32, device=x.device)


def starts_launches(p: Problem, cut: Cut, fades: Fades) -> tuple[Starts, list[Launch]]:
    """Plan what segments start from, of keys; nothing where they are whole sequences."""
    segments = p.segments(p.q.shape[2], cut.length)
    if not p.causal or not (cut.stored or segments.split):
        return Starts(), []
    initial, unread = (p.kv0, p.z0), allocate_state(p)
    sums = state_launch(p, segments, fades)
    return summed(p, sums, segments, initial, unread, reverse=False, stored=cut.stored, fades=fades)


def dq_launch(
    p: Problem,
    saved: Saved,
    errors: Errors,
    out: Backward,
    shared: dict[str, Any],
    cut: Cut,
    starts: Starts,
    asked: Tensor | None,
) -> Launch:
    """Plan dq."""
    q, k, v = p.q, p.k, p.v
    (_, H, T, D), V = q.shape, v.shape[3]
    segments = p.segments(T, cut.length)
    arguments = {
        **shared,
        **{"v": v, "delta": errors[2], "dq": out.dq, "H": H, "G": p.group, "BV": p.padded(V)},
        "asked": asked,
        **strides("v", v),
        **strides("dq", out.dq),
        **walk(segments),
    }
    reads: tuple[Tensor, ...] = (q, *errors, k, v) if p.causal else (q, *errors)
    if cut.stored:
        chosen = p.tile("stored_dq")
        arguments |= {"starts": starts.states, "parts": starts.parts}
        arguments |= {"BD": p.padded(D), "BT": chosen.tokens, "BN": chosen.width}
        programs = segments.count * -(-cut.length // chosen.tokens) * H
        return Launch("stored_dq", stored_dq_kernel, programs, arguments, chosen, reads, (out.dq,))
    chosen = p.tile("dq")
    kv0, z0 = (p.kv0, p.z0) if p.causal else (saved.kv, saved.z)
    arguments |= {
        **{"kv0": kv0, "z0": z0, "states": starts.states, "BD": chosen.width, "BT": chosen.tokens},
        **{"CAUSAL": p.causal},
        "SOURCE": "segment" if starts.states is not None else "none" if kv0 is None else "sequence",
    }
    programs = segments.count * H * -(-D // chosen.width)
    return Launch("dq", dq_kernel, programs, arguments, chosen, reads, (out.dq,))


def stored_key_launches(
    p: Problem,
    errors: Errors,
    out: Backward,
    wanted: Wanted,
    shared: dict[str, Any],
    ends: Starts,
    drawn: Tensor | None,
) -> list[Launch]:
    """Plan dk and dv from stored states: in one launch where the table says that they fit into one."""
    q, k, v = p.q, p.k, p.v
    of_k = wanted.k or (wanted.log_decay and drawn is not None)
    roles = [role for role, asked in (("stored_dk", of_k), ("stored_dv", wanted.v)) if asked]
    if len(roles) == 2 and p.has("stored_dkv"):
        roles = ["stored_dkv"]
    launches: list[Launch] = []
    for role in roles:
        chosen, of_k, of_v = p.tile(role), "k" in role[7:], "v" in role[7:]
        arguments = {
            **shared,
            **{"v": v, "delta": errors[2], "dk": out.dk, "dv": out.dv, "starts": ends.states, "parts": ends.parts},
            "drawn": drawn,
            **strides("v", v),
            **strides("dk", out.dk if of_k else k),
            **strides("dv", out.dv if of_v else v),
            **{"BD": p.padded(k.shape[3]), "BV": p.padded(v.shape[3]), "BT": chosen.tokens, "BN": chosen.width},
            **{"OF_K": of_k, "OF_V": of_v},
        }
        programs = shared["table"].shape[0] if p.cu_seqlens is not None else p.rows * shared["NSEG"]
        programs *= -(-shared["L"] // chosen.tokens) * k.shape[1]
        writes = (*((out.dk,) if of_k else ()), *((out.dv,) if of_v else ()))
        reads: tuple[Tensor, ...] = (q, k, v, *errors) if of_k else (q, k, *errors[:2])
        launches.append(Launch(role, stored_dkv_kernel, programs, arguments, chosen, reads, writes))
    return launches


def key_launches(
    p: Problem,
    errors: Errors,
    out: Backward,
    wanted: Wanted,
    shared: dict[str, Any],
    dz: Tensor | None,
    segments: Segments,
    drawn: Tensor | None,
) -> list[Launch]:
    """Plan dk and dv with states in registers; where sequences are whole, dk ends with the initial state's gradient."""
    q, k, v = p.q, p.k, p.v
    D, V = k.shape[3], v.shape[3]
    launches: list[Launch] = []
    of_decay = wanted.log_decay and drawn is not None
    final = p.causal and not segments.split and (wanted.state or (of_decay and p.kv0 is not None))
    if wanted.k or final or of_decay:
        chosen = p.tile("dk")
        arguments = {
            **shared,
            **{"v": v, "delta": errors[2], "dk": out.dk, "z1": dz, "dkv0": out.dkv0, "dz0": out.dz0},
            "drawn": drawn,
            **strides("v", v),
            **strides("dk", out.dk),
            **{"BD": chosen.width, "BV": p.padded(V), "BT": chosen.tokens, "FINAL": final},
        }
        reads: tuple[Tensor, ...] = (k, v, q, *errors) if p.causal else (k, v)
        programs = segments.count * k.shape[1] * -(-D // chosen.width)
        launches.append(Launch("dk", dk_kernel, programs, arguments, chosen, reads, (out.dk,)))
    if wanted.v:
        chosen = p.tile("dv")
        arguments = {
            **shared,
            "dv": out.dv,
            **strides("dv", out.dv),
            **{"BD": p.padded(D), "BV": chosen.width, "BT": chosen.tokens},
        }
        reads = (k, q, *errors[:2]) if p.causal else (k,)
        programs = segments.count * k.shape[1] * -(-V // chosen.width)
        launches.append(Launch("dv", dv_kernel, programs, arguments, chosen, reads, (out.dv,)))
    return launches
