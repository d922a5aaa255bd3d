"""What a rank sums up of its keys, and how the sums of several ranks make one state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.layers.rules import Gates, RuleCall
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.rotation import Rotation

SPAN = 4096
"""Keys whose features are held at once while they are summed up."""

Sums = dict[str, Tensor]


class Message(NamedTuple):
    """What a rank hands on of its part: sums over keys, and tokens.

    Attributes:
        sums: What the linear branch carries of the keys that have left the window when the next rank begins, and the
            sinks: every entry is a sum over ranks.
        tail: Keys and values of the last W tokens, ``[B, HKV, W, *]``, zeros before the first; and their angles
            ``[B, 1, W, R]``, where they are to be turned back.
    """

    sums: Sums
    tail: dict[str, Tensor]

    def packed(self) -> Tensor:
        """Return all of it end to end, in the dtype of sums."""
        parts = [*self.sums.values(), *self.tail.values()]
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in parts) else torch.float32
        return torch.cat([x.reshape(-1).to(dtype) for x in parts])

    def unpacked(self, x: Tensor) -> "Message":
        """Return messages of several ranks ``x [P, *]`` in the form of this one."""
        parts = [*self.sums.values(), *self.tail.values()]
        pieces = torch.split(x, [part.numel() for part in parts], 1)
        found = iter(piece.view(-1, *part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True))
        return Message({name: next(found) for name in self.sums}, {name: next(found) for name in self.tail})


def sums_before(layer: LinearAttention, sums: Sums, late: Sums, weights: Tensor) -> Sums:
    """Add up sums ``[R, B, *]`` of the ranks that ``weights [R, B]`` name, and those of their last tokens."""
    found = {name: _selected_sum(x, weights) for name, x in sums.items() if name != "passed"}
    if layer.rule.ordered and "kv" in found:
        found |= _in_turn(sums, late, weights)
    for name in late.keys() - ({"kv", "z", "passed"} if layer.rule.ordered else set()):
        found[name] = found[name] + _selected_sum(late[name], weights[: len(late[name])])
    return found


def _selected_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Sum ``x [R, B, *]`` over the ranks that ``weights [R, B]`` name; what the others hold does not matter."""
    named = weights.view(*weights.shape, *(1,) * (x.ndim - 2))
    return torch.where(named, x, 0).sum(0)


def _in_turn(steps: Sums, late: Sums, weights: Tensor) -> Sums:
    """Return the state of a rule that goes by the order of keys, after the ranks that ``weights [R, B]`` name.

    ``steps`` are what each rank's own keys make of a state of zeros, and how they pass another on, ``[R, B, *]``;
    ``late`` the same of their last tokens, of as many ranks as have any.
    """
    state: Sums = {name: x[:0].sum(0) for name, x in steps.items() if name in ("kv", "z")}
    for rank, named in enumerate(weights):
        after = state
        for source in (steps, late):
            if source and rank < len(source["kv"]):
                after = _after(after, {name: x[rank] for name, x in source.items()})
        state = {name: torch.where(named.view(-1, *(1,) * (x.ndim - 1)), after[name], x) for name, x in state.items()}
    return state


def _after(state: Sums, step: Sums) -> Sums:
    """Return a state after some keys, given how they pass it on ``[B, HKV, F, F]``, or by what it fades.

    Where the state tells how it passes on another, so does what is returned. Sums that nothing changes are added.
    """
    passed = step.get("passed")
    if passed is None:
        return {name: x + step[name] for name, x in state.items()}

    def pass_on(x: Tensor) -> Tensor:
        return passed @ x if passed.shape[-1] > 1 else passed * x

    found = {"kv": pass_on(state["kv"]) + step["kv"]}
    if "z" in state:
        found["z"] = passed[..., 0] * state["z"] + step["z"]
    if "passed" in state:
        found["passed"] = pass_on(state["passed"])
    return found


def _spans(x: Tensor | None, dim: int, number: int) -> Sequence[Tensor | None]:
    """Cut into pieces of :data:`SPAN` tokens."""
    return (None,) * number if x is None else torch.split(x, SPAN, dim)


def sums_of(
    layer: LinearAttention,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    mask: Tensor | None,
    rotation: Rotation | None = None,
) -> Sums:
    """Sum up keys as the linear branch does, without a query: return the rule's tensors, and what the mix keeps.

    Keys are ``[B, HKV, S, D]``, values ``[B, HKV, S, V]``, ``numbers [B, S]`` or ``[B, HKV, S]`` those in their text;
    ``mask [B, S]`` is True for a key that counts, None where all do. A rotation is to be turned back.
    """
    backend = layer.settings.backend

    def read(k: Tensor, v: Tensor, numbers: Tensor, mask: Tensor | None, turns: Tensor | None) -> Sums:
        phi_k = k if rotation is None or turns is None else rotation.of_others(turns).undo(k, backend)
        gates, kernel = layer.gates(phi_k, v), layer.elementwise
        if kernel is None:
            phi_k = features_of(layer.feature_map, phi_k, "k", numbers, backend)
        if gates is not None:
            return _passing(layer, phi_k, v, gates, kernel, mask)
        # The state does not depend on the one query that asks for it.
        unused = phi_k.new_zeros(len(k), layer.sizes.num_heads, 1, phi_k.shape[3])
        call = RuleCall(unused, phi_k, v, kernel=kernel, key_mask=mask, causal=False)
        return dict(layer.rule.read(call, None).state)

    if layer.elementwise is not None and rotation is None and not layer.rule.ordered:
        # The operation walks by itself.
        found = read(k, v, numbers, mask, None)
    else:
        found = {}
        whole = (k, 2), (v, 2), (numbers, -1), (mask, 1), (None if rotation is None else rotation.turns, 1)
        number = -(-k.shape[2] // SPAN)
        for span in zip(*(_spans(x, dim, number) for x, dim in whole), strict=True):
            # Features are larger than keys: a few at a time are computed, and again in the backward.
            learns = torch.is_grad_enabled()
            step = checkpoint(read, *span, use_reentrant=False) if learns else read(*span)
            found = _after(found, step) if found else step
    return found


def key_sums(layer: LinearAttention, k: Tensor, mask: Tensor | None) -> Sums:
    """Return the sum of keys as the model makes them, where the mix reads it; shapes are as of :func:`sums_of`."""
    if not layer.mix.sums_keys:
        return {}
    keys = k if mask is None else k.masked_fill(~mask[:, None, :, None], 0)
    return {"far_keys": keys.sum(2, dtype=torch.promote_types(keys.dtype, torch.float32))}


def _passing(
    layer: LinearAttention, phi_k: Tensor, v: Tensor, gates: Gates, kernel: str | None, mask: Tensor | None
) -> Sums:
    """Return what keys of a rule with gates make of a state of zeros, and as ``passed`` how they pass another on.

    A state S becomes ``P S + A``. For rules that overwrite, P is what the same keys make of the identity, of values
    that are 0; others fade a state by one number for each head. Shapes are as of :class:`RuleCall`.
    """
    batch, heads, _, size = phi_k.shape
    state, values = None, v
    if gates.beta is not None:
        zeros = upcast(v[:, :, :0]).new_zeros(batch, heads, size, v.shape[3])
        unit = torch.eye(size, dtype=zeros.dtype, device=v.device).expand(batch, heads, -1, -1)
        state, values = {"kv": torch.cat([zeros, unit], -1)}, F.pad(v, (0, size))
    if gates.scale is not None:
        gates = gates._replace(scale=gates.scale.new_ones(heads))
    unused = phi_k.new_zeros(1, 1, 1, 1).expand(phi_k.shape)
    found = dict(layer.rule.read(RuleCall(unused, phi_k, values, gates, kernel, mask), state).state)
    if gates.beta is not None:
        found["kv"], found["passed"] = torch.split(found["kv"], [v.shape[3], size], -1)
    elif gates.log_decay is not None:
        fading = gates.log_decay if mask is None else gates.log_decay.masked_fill(~mask[:, None], 0)
        found["passed"] = fading.sum(-1).exp()[..., None, None]
    return found
