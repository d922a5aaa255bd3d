"""Keys that are kept exactly once they have left the window: how they come and go, and what is left to the others."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.layers.retention import Retention
from hf_linear_attn.layers.state import Slot
from hf_linear_attn.layers.window import Tokens
from hf_linear_attn.ops.kept import AGES, Choice, Entering, choose_kept
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.window import NOWHERE, KeptKeys


class Folded(NamedTuple):
    """What goes into the linear branch at each query of a call: the key that is not kept any longer.

    Attributes:
        k: ``[B, HKV, T, D]``, with its rotation undone where the branch reads it so.
        raw: The same as the model has made it.
        v: ``[B, HKV, T, V]``.
        mask: Whether there is one ``[B, T]`` bool.
        positions: Its number in its text ``[B, HKV, T]`` int64.
    """

    k: Tensor
    raw: Tensor
    v: Tensor
    mask: Tensor
    positions: Tensor


class Beyond(NamedTuple):
    """The keys of a call beyond its windows: C that were kept before, and those that leave the window at each query.

    Attributes:
        k: ``[B, HKV, C + T, D]``.
        v: ``[B, HKV, C + T, V]``.
        enters: Whether one leaves the window at a query ``[B, T]`` bool.
        positions: Numbers in their texts ``[B, HKV, C + T]`` int64.
        number: Keys that had left it before ``[B]`` int64.
        choice: Which are kept.
        scores: Of all, where the rule compares scores ``[B, HKV, C + T, 6]``; None where it compares values.
        turns: By which they are turned ``[B, HKV, C + T, R]``; None where nobody turns them back.
        rotation: How; None likewise.
    """

    k: Tensor
    v: Tensor
    enters: Tensor
    positions: Tensor
    number: Tensor
    choice: Choice
    scores: Tensor | None
    turns: Tensor | None
    rotation: Rotation | None

    def exact(self) -> KeptKeys:
        """Return what queries see exactly."""
        batch, count = self.enters.shape
        query = torch.arange(count, device=self.k.device).expand(batch, -1)
        places = self.k.shape[2] - count
        taken = torch.arange(places, device=self.k.device) < self.number[:, None]
        begins = torch.cat([torch.where(taken, -1, NOWHERE), torch.where(self.enters, query, NOWHERE)], 1)
        # Where none goes, that is put before the first key.
        ends = begins.new_full((*self.k.shape[:2], self.k.shape[2] + 1), NOWHERE)
        ends = ends.scatter(2, self.choice.gone + 1, query[:, None].expand(-1, self.k.shape[1], -1))
        return KeptKeys(self.k, self.v, self.choice.slot, begins, ends[:, :, 1:])

    def folded(self, backend: str) -> Folded:
        """Return what the linear branch folds instead of what leaves the window."""
        raw, v, mask, turns = self.gone()
        k = raw
        if self.rotation is not None and turns is not None:
            # Every head turns keys of its own back.
            rotation = self.rotation.of_others(turns.flatten(0, 1))
            k = rotation.undo(raw.flatten(0, 1)[:, None], backend).view(raw.shape)
        return Folded(k, raw, v, mask, self.positions.gather(2, self.choice.gone.clamp(min=0)))

    def gone(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the keys that go at each query, their values, whether there are any, and by which they are turned."""
        mask, index = self.choice.gone[:, 0] >= 0, self.choice.gone.clamp(min=0)
        k, v = (_taken(x, index).masked_fill(~mask[:, None, :, None], 0) for x in (self.k, self.v))
        return k, v, mask, None if self.turns is None else _taken(self.turns, index)

    def kept_at(self) -> list[list[list[int]]]:
        """Return the numbers of the keys that are kept after the call, by row and key head, in order."""
        places = self.k.shape[2] - self.enters.shape[1]
        taken = (self.number + self.enters.sum(1)).clamp(max=places).tolist()
        return [[sorted(head[:n].tolist()) for head in row] for row, n in zip(self.choice.at, taken, strict=True)]

    def close(self, head_dim: int) -> dict[str, Tensor]:
        """Return the tensors of a state after the call, with gradients where those are recorded."""
        held = self.choice.held
        found = {"kept_k": _taken(self.k, held), "kept_v": _taken(self.v, held)}
        found["kept_at"] = self.choice.at
        if self.scores is None:
            found["kept_nearest"] = self.choice.nearest
        else:
            found["kept_scores"] = _taken(self.scores, held)
        if self.turns is not None:
            turns = _taken(self.turns, held)
            found["kept_turns"] = F.pad(turns, (0, head_dim - turns.shape[3]))
        return found


class Kept:
    """Where keys lie that are kept beyond the window, C >= 1 of each key head, as a rule chooses them.

    ``turned`` says that a linear branch reads those that go with their rotation undone, so that angles are kept too.
    """

    def __init__(self, size: int, retention: Retention, *, turned: bool) -> None:
        self.size, self.retention, self.turned = size, retention, turned

    def slots(self, value_dim: int) -> dict[str, Slot]:
        """Describe the tensors."""
        head_dim, _, kv_heads, *_ = self.retention.sizes
        found = {
            "kept_k": Slot((kv_heads, self.size, head_dim), "token"),
            "kept_v": Slot((kv_heads, self.size, value_dim), "token"),
            "kept_at": Slot((kv_heads, self.size), torch.int64),
        }
        if self.turned:
            found["kept_turns"] = Slot((kv_heads, self.size, head_dim), "token")
        if self.retention.scores:
            return found | {"kept_scores": Slot((kv_heads, self.size, AGES))}
        return found | {"kept_nearest": Slot((kv_heads, self.size), torch.float32)}

    def open(
        self,
        tokens: Tokens,
        positions: Tensor,
        count: int,
        number: Tensor,
        held: Mapping[str, Tensor] | None,
        weights: Mapping[str, Tensor],
        backend: str,
    ) -> Beyond:
        """Choose among the keys that leave the window in a call of ``count`` tokens, and those that were kept before.

        ``positions [B, P + T]`` number the tokens in their texts, and ``number [B]`` int64 counts the keys that had
        left the window before. ``held`` is what :meth:`Beyond.close` returned before; None where nothing was read.
        """
        batch, heads = tokens.k.shape[:2]
        # At query t leaves what came a window before it.
        lead = min(max(self.retention.window + count - tokens.k.shape[2], 0), count)
        leaving = count - lead

        enters, where = (F.pad(x[:, :leaving], (lead, 0)) for x in (tokens.counted(), positions))
        if held is None:
            held = {name: slot.zeros(batch, tokens.k) for name, slot in self.slots(tokens.v.shape[3]).items()}

        def entering(before: Tensor, x: Tensor) -> Tensor:
            nothing = x.new_zeros(*x.shape[:2], lead, x.shape[3])
            return torch.cat([before, nothing, x[:, :, :leaving]], 2)

        k, v = entering(held["kept_k"], tokens.k), entering(held["kept_v"], tokens.v)
        rule, scores = self.retention, None
        nearest = held.get("kept_nearest", held["kept_k"].new_empty(batch, heads, 0, dtype=torch.float32))
        asked = Entering(v, enters, where, number, nearest, held["kept_at"])
        if rule.scores:
            with torch.no_grad():
                scores = entering(held["kept_scores"], rule.score(tokens, leaving, weights, backend))
            asked = asked._replace(compared=scores, window=rule.window)
        turns = None
        if self.turned and tokens.rotation is not None:
            new = tokens.rotation.turns[:, None].expand(batch, heads, -1, -1)
            old = held.get("kept_turns", new.new_zeros(batch, heads, self.size, new.shape[3]))[..., : new.shape[3]]
            turns = entering(old, new.to(old.dtype))
        where = torch.cat([held["kept_at"], where[:, None].expand(-1, heads, -1)], 2)
        return Beyond(k, v, enters, where, number, choose_kept(asked, backend), scores, turns, tokens.rotation)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Return the keys ``[B, HKV, N, *]`` of ``x [B, HKV, M, *]`` by their indices ``[B, HKV, N]``."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))
