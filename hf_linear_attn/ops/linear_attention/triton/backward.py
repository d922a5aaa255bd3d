"""The backward: what it is given and returns, and which kernels of gradients it launches."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.ops.linear_attention.triton.fade import Fades, Starts, fade_back_launch, fade_launches
from hf_linear_attn.ops.linear_attention.triton.forward import Forward, allocate_state, state_launch, summed
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
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, Tile, padded, planned


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
    known = {"o": o, "do": do, "delta": delta, "rows": rows, "T": T, "H": H}
    known |= {"V": V, "BV": padded(V), "BT": chosen.tokens}
    return planned("delta", delta_kernel, -(-rows // chosen.tokens), known, chosen, (o, do), (delta,))


def backward_launches(
    p: Problem,
    saved: Saved,
    do: Tensor,
    dkv: Tensor | None,
    dz: Tensor | None,
    wanted: Wanted = EVERY,
    into: Tensor | None = None,
    known_delta: Tensor | None = None,
) -> tuple[Backward, list[Launch]]:
    """Plan the backward: the gradients, allocated but not computed, and the launches that compute them, in order.

    Those of the final state are fp32 and contiguous, or None where the loss does not depend on it. That of v is added
    to another, ``into``, where there is one. ``known_delta`` is ``do . o [B, H, T]``, fp32, where that is known.
    """
    out = allocate_backward(p, wanted if into is None else wanted._replace(v=False))
    out = out if into is None else out._replace(dv=into)
    delta = torch.empty_like(saved.den) if known_delta is None else known_delta
    of_decay = wanted.log_decay and p.log_decay is not None
    of_keys = wanted.k or wanted.v or wanted.state or of_decay
    # What a decay changes is a product of what comes before it and of what comes after: both are cut alike.
    cut = choose(p, "dk") if p.log_decay is None else choose(p, "dq", "dk")
    segments = p.segments(p.k.shape[2], cut.length)
    fades, launches = fade_launches(p, segments)
    known = p.shared(segments) | fades.arguments() | out._asdict() | {"ADD": into is not None}
    known |= {"o": saved.o, "do": do, "den": saved.den, "delta": delta, "d_b": saved.den.stride(0)}
    known["KNOWN"] = known_delta is not None
    ends = Starts()
    seed: tuple[Tensor | None, Tensor | None] = dkv, dz
    if of_keys and (cut.stored or segments.split or not p.causal):
        summing = segments if p.causal else p.segments(p.q.shape[2], choose(p, "reverse_state").length)
        sums = reverse_state_launch(p, known, summing)
        initial = out.dkv0, out.dz0
        ends, before = summed(p, sums, summing, seed, initial, reverse=True, stored=cut.stored, fades=fades)
        launches += before
        if not p.causal:
            seed = initial
    elif known_delta is None and (wanted.q or wanted.k or wanted.state or of_decay):
        launches.append(delta_launch(p.tile("delta"), saved.o, do, delta))
    starts, asked = Starts(), None
    if wanted.q or of_decay:
        of_queries = choose(p, "dq") if p.log_decay is None else cut
        starts, before = starts_launches(p, of_queries, fades)
        launches += before
        asked = _rows_of(p, "dq", p.q, of_queries)
        launches.append(dq_launch(p, saved, known | {"asked": asked}, of_queries, starts))
    drawn = _rows_of(p, "dk", p.k, cut)
    known |= {"drawn": drawn, "kv1": seed[0], "z1": seed[1], "SOURCE": ends.source(seed[0])}
    if of_keys and cut.stored:
        launches += stored_key_launches(p, wanted, known, ends, segments)
    elif of_keys:
        launches += key_launches(p, wanted, known | {"states": ends.states}, segments)
    if of_decay and p.log_decay is not None and drawn is not None and asked is not None:
        initial = out.dkv0, out.dz0
        launches.append(fade_back_launch(p, p.log_decay, segments, drawn, asked, out.dlog_decay, initial, starts, ends))
    return out, launches


Known = dict[str, Any]
"""What kernels of the backward are told alike, by name."""


def reverse_state_launch(p: Problem, known: Known, segments: Segments) -> Launch:
    """Plan the sums over each segment's queries, and delta."""
    chosen, (o, do, den, delta) = p.tile("reverse_state"), (known[name] for name in ("o", "do", "den", "delta"))
    known = known | p.shared(segments) | {"states": p.states(segments)}
    known |= {"BD": chosen.width, "BV": p.padded(p.v.shape[3]), "BT": chosen.tokens}
    programs = segments.count * p.k.shape[1] * -(-p.k.shape[3] // chosen.width)
    given, writes = ((delta,), ()) if known["KNOWN"] else ((o,), (delta,))
    return planned("reverse_state", reverse_state_kernel, programs, known, chosen, (p.q, do, den, *given), writes)


def _rows_of(p: Problem, role: str, x: Tensor, cut: Cut) -> Tensor | None:
    """Allocate a number per token and tile of features ``[B, heads, tiles, T]``, where sums fade."""
    if p.log_decay is None:
        return None
    tiles = -(-x.shape[3] // (p.held() if cut.stored else p.tile(role).width))
    return torch.empty(*x.shape[:2], tiles, x.shape[2], dtype=torch.float32, device=x.device)


def _derives_alone(p: Problem) -> bool:
    """Tell whether no gradient of a feature depends on its own value, so that kernels do not read it."""
    return p.phi == "identity" and p.log_decay is None


def starts_launches(p: Problem, cut: Cut, fades: Fades) -> tuple[Starts, list[Launch]]:
    """Plan what segments start from, of keys; nothing where they are whole sequences."""
    segments = p.segments(p.q.shape[2], cut.length)
    if not p.causal or not (cut.stored or segments.split):
        return Starts(), []
    initial, unread = (p.kv0, p.z0), allocate_state(p)
    sums = state_launch(p, segments, fades)
    return summed(p, sums, segments, initial, unread, reverse=False, stored=cut.stored, fades=fades)


def dq_launch(p: Problem, saved: Saved, known: Known, cut: Cut, starts: Starts) -> Launch:
    """Plan dq."""
    (_, H, T, D), V = p.q.shape, p.v.shape[3]
    segments = p.segments(T, cut.length)
    known = known | p.shared(segments) | {"BV": p.padded(V)}
    errors, writes = (known["do"], known["den"], known["delta"]), (known["dq"],)
    own = () if _derives_alone(p) else (p.q,)
    reads: tuple[Tensor, ...] = (*own, *errors, p.k, p.v) if p.causal else (*own, *errors)
    if cut.stored:
        chosen = p.tile("stored_dq")
        known |= {"starts": starts.states, "parts": starts.parts}
        known |= {"BD": p.held(), "BT": chosen.tokens, "BN": chosen.width}
        programs = segments.count * -(-cut.length // chosen.tokens) * H * -(-D // p.held())
        return planned("stored_dq", stored_dq_kernel, programs, known, chosen, reads, writes)
    chosen = p.tile("dq")
    kv0, z0 = (p.kv0, p.z0) if p.causal else (saved.kv, saved.z)
    known |= {"kv0": kv0, "z0": z0, "states": starts.states, "SOURCE": starts.source(kv0)}
    known |= {"BD": chosen.width, "BT": chosen.tokens}
    programs = segments.count * H * -(-D // chosen.width)
    return planned("dq", dq_kernel, programs, known, chosen, reads, writes)


def stored_key_launches(p: Problem, wanted: Wanted, known: Known, ends: Starts, segments: Segments) -> list[Launch]:
    """Plan dk and dv from stored states: in one launch where the table has a tile for both."""
    k, v, do, den, delta = (known[name] for name in ("k", "v", "do", "den", "delta"))
    of_k = wanted.k or (wanted.log_decay and known["drawn"] is not None)
    roles = [role for role, asked in (("stored_dk", of_k), ("stored_dv", wanted.v)) if asked]
    if len(roles) == 2 and p.has("stored_dkv"):
        roles = ["stored_dkv"]
    launches: list[Launch] = []
    for role in roles:
        chosen, of_k, of_v = p.tile(role), "k" in role[7:], "v" in role[7:]
        apart = of_k and of_v and p.keys_apart
        own: Known = {"starts": ends.states, "parts": ends.parts, "OF_K": of_k, "OF_V": of_v, "APART": apart}
        D, held = k.shape[3], p.held()
        own |= {"BD": held, "BV": p.padded(v.shape[3]), "BT": chosen.tokens, "BN": chosen.width}
        share = (-(-D // held) if of_k else 1) + apart
        programs = segments.count * -(-segments.length // chosen.tokens) * k.shape[1] * share
        writes = (*((known["dk"],) if of_k else ()), *((known["dv"],) if of_v else ()))
        reads = (p.q, v, do, den, delta) if of_k else (p.q, do, den)
        reads = (*reads, k) if of_v or not _derives_alone(p) else reads
        reads = (*reads, known["dv"]) if of_v and known["ADD"] else reads
        launches.append(planned(role, stored_dkv_kernel, programs, known | own, chosen, reads, writes))
    return launches


def key_launches(p: Problem, wanted: Wanted, known: Known, segments: Segments) -> list[Launch]:
    """Plan dk and dv with states in registers; where sequences are whole, dk ends with the initial state's gradient."""
    k, v, do, den, delta = (known[name] for name in ("k", "v", "do", "den", "delta"))
    D, V, programs = k.shape[3], v.shape[3], segments.count * k.shape[1]
    launches: list[Launch] = []
    of_decay = wanted.log_decay and known["drawn"] is not None
    final = p.causal and not segments.split and (wanted.state or (of_decay and p.kv0 is not None))
    if wanted.k or final or of_decay:
        chosen = p.tile("dk")
        own = {"BD": chosen.width, "BV": p.padded(V), "BT": chosen.tokens, "FINAL": final}
        reads: tuple[Tensor, ...] = (k, v, p.q, do, den, delta) if p.causal else (k, v)
        tiles = -(-D // chosen.width)
        launches.append(planned("dk", dk_kernel, programs * tiles, known | own, chosen, reads, (known["dk"],)))
    if wanted.v:
        chosen = p.tile("dv")
        own = {"BD": p.padded(D), "BV": chosen.width, "BT": chosen.tokens}
        reads = (k, p.q, do, den) if p.causal else (k,)
        tiles = -(-V // chosen.width)
        launches.append(planned("dv", dv_kernel, programs * tiles, known | own, chosen, reads, (known["dv"],)))
    return launches
