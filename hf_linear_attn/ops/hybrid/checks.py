"""What a step of a layer with a window asks of its arguments; see :mod:`hf_linear_attn.ops.step.checks`."""

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.hybrid.records import HybridStep

HYBRID_MIXES = ("gate", "key", "window")
"""Mixing rules that the kernel knows."""
PAIRS = ("half", "next")
"""What it can turn together."""


def check_hybrid(step: HybridStep) -> None:
    """Refuse a step whose tensors do not fit together: the kernel would write beyond them."""
    (held, kv_heads, slots, head_dim), (batch, heads) = step.near_k.shape, step.q.shape[:2]
    if step.rows is None:
        batch = held
    value_dim, features = step.v.shape[3], head_dim
    if step.mix not in HYBRID_MIXES:
        raise ArgumentError("mix", "be one that the kernel knows", step.mix, "Use one of those", available=HYBRID_MIXES)
    if heads % kv_heads:
        raise ArgumentError(
            "k", f"have a head count that divides q's {heads}", kv_heads, "Check the grouping of heads."
        )
    if not 0 <= step.sinks <= slots - 2:
        raise ArgumentError("sinks", f"leave 2 of {slots} slots to the window", step.sinks, "Pass the layer's own.")
    shapes: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("q", step.q, (batch, heads, 1, head_dim)),
        ("k", step.k, (batch, kv_heads, 1, head_dim)),
        ("v", step.v, (batch, kv_heads, 1, value_dim)),
        ("seen", step.seen, (batch,)),
        ("near_v", step.near_v, (held, kv_heads, slots, value_dim)),
    ]
    if step.rows is None:
        shapes.append(("near_mask", step.near_mask, (batch, slots)))
    else:
        shapes += [("rows", step.rows, (batch,)), ("place", step.place, (batch,))]
        for name, x in (("key_mask", step.key_mask), ("near_mask", step.near_mask)):
            if x is not None:
                raise ArgumentError(name, "be None in a pool", tuple(x.shape), "Its texts have no padding.")
    if step.near_turns is not None:
        turned = 0 if step.turns is None else step.turns.shape[-1]
        rows = 1 if step.turns is None else step.turns.shape[0]
        shapes += [
            ("near_turns", step.near_turns, (held, slots, head_dim)),
            ("turns", step.turns, (1 if rows == 1 else batch, 1, min(turned - turned % 2, head_dim))),
        ]
        if step.pairs not in PAIRS:
            raise ArgumentError(
                "pairs", "be one that the kernel knows", step.pairs, "Use one of those", available=PAIRS
            )
    if step.key_mask is not None:
        shapes.append(("key_mask", step.key_mask, (batch, 1)))
    if step.mix != "window":
        own = _copies(step.z, value_dim) if step.rows is None else ()
        if step.weight_k is not None:
            half = step.weight_k.shape[2]
            features = 2 * half
            for name, x, number in (("weight_q", step.weight_q, heads), ("weight_k", step.weight_k, kv_heads)):
                copies = 1 if x is None or len(x) == 1 else number
                shapes.append((name, x, (copies, head_dim, half)))
        shapes += [
            ("kv", step.kv, (held, kv_heads, features, value_dim)),
            ("z", step.z, (held, kv_heads, *own, features)),
            ("bias", step.bias, (heads,)),
            ("weight", step.weight, (heads, head_dim)),
        ]
        if step.decay_bias is not None:
            shapes += [
                ("decay_bias", step.decay_bias, (kv_heads,)),
                ("decay_key", step.decay_key, (kv_heads, head_dim)),
                ("decay_value", step.decay_value, (kv_heads, value_dim)),
            ]
        if step.mix == "key":
            shapes.append(("far_keys", step.far_keys, (held, kv_heads, *own, head_dim)))
    for name, x, shape in shapes:
        if x is None or x.shape != shape:
            raise ArgumentError(
                name, f"have shape {shape}", None if x is None else tuple(x.shape), "Pass this layer's own."
            )
    for name in ("kv", "z", "far_keys", "near_k", "near_v", "near_mask", "near_turns", "seen"):
        x = getattr(step, name)
        if x is None:
            continue
        if name in ("kv", "z", "far_keys") and x.dtype != torch.float32:
            raise ArgumentTypeError(name, "be torch.float32", x.dtype, "States are never kept in less.")
        if not (x if step.rows is None or name == "seen" else x[:1]).is_contiguous():
            raise ArgumentError(name, "be contiguous, to be updated in place", x.stride(), "Copy it once.")


def _copies(z: Tensor | None, value_dim: int) -> tuple[int, ...]:
    """Return the dimension of copies that z has, if it has one."""
    if z is None or z.ndim == 3:
        return ()
    if not 1 <= z.shape[2] <= value_dim:
        raise ArgumentError("z", f"have 1 to V = {value_dim} copies", z.shape[2], "Let the layer allocate its state.")
    return (z.shape[2],)
