"""What a step of a layer with a window asks of its arguments; see :mod:`hf_linear_attn.ops.step.checks`."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.hybrid.records import HybridStep
from hf_linear_attn.ops.kept import AGES
from hf_linear_attn.ops.linear_attention.checks import check_groups

HYBRID_MIXES = ("gate", "key", "window")
"""Mixing rules that the kernel knows."""
PAIRS = ("half", "next")
"""What it can turn together."""


def check_hybrid(step: HybridStep) -> None:
    """Refuse a step whose tensors do not fit together: the kernel would write beyond them."""
    (_, kv_heads, slots, _), heads = step.near_k.shape, step.q.shape[1]
    if step.mix not in HYBRID_MIXES:
        raise ArgumentError("mix", "be one that the kernel knows", step.mix, "Use one of those", available=HYBRID_MIXES)
    check_groups(heads, kv_heads)
    if not 0 <= step.sinks <= slots - 2:
        raise ArgumentError("sinks", f"leave 2 of {slots} slots to the window", step.sinks, "Pass the layer's own.")
    if step.near_turns is not None and step.pairs not in PAIRS:
        raise ArgumentError("pairs", "be one that the kernel knows", step.pairs, "Use one of those", available=PAIRS)
    if step.rows is not None:
        for name in ("key_mask", "near_mask"):
            x = getattr(step, name)
            if x is not None:
                raise ArgumentError(name, "be None in a pool", tuple(x.shape), "Its texts have no padding.")
    shapes = _shapes_of_window(step) | ({} if step.mix == "window" else _shapes_of_sums(step)) | _shapes_of_kept(step)
    found = _tensors(step)
    for name, shape in shapes.items():
        x = found.get(name)
        if x is None or x.shape != shape:
            raise ArgumentError(
                name, f"have shape {shape}", None if x is None else tuple(x.shape), "Pass this layer's own."
            )
    for name in ("k", "v", "near_k", "near_v", "kept_k", "kept_v"):
        x = found.get(name)
        if x is not None and x.dtype != step.q.dtype:
            raise ArgumentTypeError(name, f"be {step.q.dtype}, as q is", x.dtype, "Pass all in one dtype.")
    for name in ("kv", "z", "far_keys", "near_k", "near_v", "near_mask", "near_turns", "seen", *KEPT):
        x = found.get(name)
        if x is None:
            continue
        if name in ("kv", "z", "far_keys") and x.dtype != torch.float32:
            raise ArgumentTypeError(name, "be torch.float32", x.dtype, "States are never kept in less.")
        if not (x if step.rows is None or name == "seen" else x[:1]).is_contiguous():
            raise ArgumentError(name, "be contiguous, to be updated in place", x.stride(), "Copy it once.")


KEPT = "kept_k", "kept_v", "kept_at", "kept_turns", "kept_nearest", "kept_scores"
"""A state's tensors of kept keys."""


def _tensors(step: HybridStep) -> dict[str, Any]:
    """Return what a step is told by the names of its state, among it every tensor."""
    kept = {} if step.kept is None else step.kept._asdict()
    return step._asdict() | {f"kept_{name}": x for name, x in kept.items()}


Shapes = dict[str, tuple[int, ...]]


def _shapes_of_window(step: HybridStep) -> Shapes:
    """Return the shapes that tokens and window have to have, by name."""
    (held, kv_heads, slots, head_dim), heads, value_dim = step.near_k.shape, step.q.shape[1], step.v.shape[3]
    batch = held if step.rows is None else step.q.shape[0]
    shapes: Shapes = {
        "q": (batch, heads, 1, head_dim),
        "k": (batch, kv_heads, 1, head_dim),
        "v": (batch, kv_heads, 1, value_dim),
        "seen": (batch,),
        "near_v": (held, kv_heads, slots, value_dim),
    }
    shapes |= {"near_mask": (batch, slots)} if step.rows is None else {"rows": (batch,), "place": (batch,)}
    if step.near_turns is not None:
        rows, turned = (1, 0) if step.turns is None else (step.turns.shape[0], step.turns.shape[-1])
        shapes["near_turns"] = held, slots, head_dim
        shapes["turns"] = 1 if rows == 1 else batch, 1, min(turned - turned % 2, head_dim)
    if step.key_mask is not None:
        shapes["key_mask"] = batch, 1
    return shapes


def _shapes_of_sums(step: HybridStep) -> Shapes:
    """Return the shapes that sums have to have, and what is learned, by name."""
    (held, kv_heads, _, head_dim), heads, value_dim = step.near_k.shape, step.q.shape[1], step.v.shape[3]
    own, features, shapes = _copies(step.z, value_dim) if step.rows is None else (), head_dim, Shapes()
    if step.weight_k is not None:
        half = step.weight_k.shape[2]
        features = 2 * half
        for name, x, number in (("weight_q", step.weight_q, heads), ("weight_k", step.weight_k, kv_heads)):
            shapes[name] = 1 if x is None or len(x) == 1 else number, head_dim, half
    shapes |= {
        "kv": (held, kv_heads, features, value_dim),
        "z": (held, kv_heads, *own, features),
        "bias": (heads,),
        "weight": (heads, head_dim),
    }
    if step.decay_bias is not None:
        of_gate = {"decay_bias": (), "decay_key": (head_dim,), "decay_value": (value_dim,)}
        shapes |= {name: (kv_heads, *sizes) for name, sizes in of_gate.items()}
    if step.mix == "key":
        shapes["far_keys"] = held, kv_heads, *own, head_dim
    return shapes


def _shapes_of_kept(step: HybridStep) -> Shapes:
    """Return the shapes that kept keys have to have, by name."""
    kept, (held, kv_heads, _, head_dim) = step.kept, step.near_k.shape
    if kept is None:
        return {}
    places = held, kv_heads, kept.k.shape[2]
    shapes: Shapes = {"kept_k": (*places, head_dim), "kept_v": (*places, step.v.shape[3]), "kept_at": places}
    shapes |= {"kept_nearest": places} if kept.scores is None else {"kept_scores": (*places, AGES)}
    return shapes if kept.turns is None else shapes | {"kept_turns": (*places, head_dim)}


def _copies(z: Tensor | None, value_dim: int) -> tuple[int, ...]:
    """Return the dimension of copies that z has, if it has one."""
    if z is None or z.ndim == 3:
        return ()
    if not 1 <= z.shape[2] <= value_dim:
        raise ArgumentError("z", f"have 1 to V = {value_dim} copies", z.shape[2], "Let the layer allocate its state.")
    return (z.shape[2],)
