"""A converted layer: split the tokens that a query may see, read both parts, join what they give."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.feature_maps import FeatureMap, get_feature_map
from hf_linear_attn.layers.call import Branch, Call, Part, Piece
from hf_linear_attn.layers.kept import Folded, Kept
from hf_linear_attn.layers.mixes import MIXES, Far, Near
from hf_linear_attn.layers.numbers import number_beyond, positions_of
from hf_linear_attn.layers.packing import packed
from hf_linear_attn.layers.retention import RETENTIONS
from hf_linear_attn.layers.rules import RULES, Gates, RuleCall, Sizes
from hf_linear_attn.layers.spans import read_whole
from hf_linear_attn.layers.state import Slot, State
from hf_linear_attn.layers.step import step_, steps
from hf_linear_attn.layers.window import Tokens, Window
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.step import copies_of
from hf_linear_attn.ops.window import running_sum


class Shard(Protocol):
    """One rank's part of texts that are split over ranks: how a layer attends in it."""

    def attend(self, layer: "LinearAttention", q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Attend from the part's queries; arguments and result as of :meth:`LinearAttention.attend`."""


def reads_plain_keys(config: LinearAttentionConfig) -> bool:
    """Tell whether a layer of such settings has anything that can read keys with their rotation undone."""
    if config.window is None or MIXES[config.mix].has_far:
        return True
    return bool(config.kept) and RETENTIONS[config.retention].reads_keys


class LinearAttention(nn.Module):
    """Compute one converted layer's attention, from projected queries, keys and values to the heads' outputs.

    It sits in the attention module as ``linear_attention``; everything that is learned lives here.

    Args:
        config: The settings.
        sizes: The layer's sizes.
        name: The layer's name, for messages.
        rotated: Whether a call can bring a rotation.
    """

    def __init__(self, config: LinearAttentionConfig, sizes: Sizes, name: str, *, rotated: bool = False) -> None:
        super().__init__()
        self.settings, self.name = config, name
        self.sizes: Sizes = sizes
        head_dim, heads, kv_heads, scaling, _ = sizes
        self.feature_map: FeatureMap = get_feature_map(
            config.feature_map, head_dim, heads, kv_heads, scaling=scaling, **config.feature_map_options
        )
        self.rule = RULES[config.update_rule](config.eps, config.backend)
        self.mix = MIXES[config.mix](sizes, config.eps)
        self.window = None if config.window is None else Window(config.window, config.sinks)
        self.undoes = rotated and config.rotary == "undo" and reads_plain_keys(config)
        """Whether the linear branch, and what chooses kept keys, read queries and keys with the rotation undone."""
        self.kept = None
        if config.window is not None and config.kept:
            retention = RETENTIONS[config.retention](sizes, config.window, config.retention_units)
            self.kept = Kept(config.kept, retention, turned=self.undoes and self.mix.has_far)
        self.layout: Layout | None = None
        """How the model rotates, for a caller with a rotation; found when it is first called."""
        # A map without parameters must leave a trace in a checkpoint too, so that software without this package
        # reports an unexpected weight instead of silently reading a softmax model.
        self.register_buffer("format_version", torch.tensor([config.format_version]))
        self.has_far = self.window is None or self.mix.has_far
        """Whether there is a linear branch."""
        starts: dict[Part, Mapping[str, Tensor]] = {
            "mix": {} if self.window is None else self.mix.weights(),
            "rule": self.rule.weights(sizes) if self.has_far else {},
            "retention": {} if self.kept is None else self.kept.retention.weights(),
        }
        self.learned = {owner: tuple(start) for owner, start in starts.items()}
        """Names of what parts of the layer learn, each a parameter ``mix_bias``, ``rule_decay_bias``, ..."""
        for owner, start in starts.items():
            for name, x in start.items():
                self.register_parameter(f"{owner}_{name}", nn.Parameter(x))
        self.disabled: frozenset[Branch] = frozenset()
        self.shard: Shard | None = None
        """The part of the texts that calls read, where texts are split over ranks."""
        self.host: Any = None
        """What the module around this one gets back when this one is taken out."""

    def extra_repr(self) -> str:
        """Show the settings that matter in ``print(model)``."""
        settings = self.settings
        kept = f"kept={settings.kept}, " if settings.kept else ""
        near = f"window={settings.window}, sinks={settings.sinks}, {kept}"
        return f"{near}mix={settings.mix!r}, rule={settings.update_rule!r}"

    def slots(self, value_dim: int, device: torch.device) -> dict[str, Slot]:
        """Describe the tensors of this layer's state, for values of that size on a device."""
        head_dim, kv_heads = self.sizes.head_dim, self.sizes.num_kv_heads
        features = self.feature_map.feature_dim
        copies = copies_of(device, "decode" if self.window is None else "hybrid", features, value_dim)
        slots = {"seen": Slot((), torch.int64)}
        if self.has_far:
            slots |= self.rule.slots(kv_heads, features, value_dim, copies)
        if self.window is not None:
            slots |= self.window.slots(kv_heads, head_dim, value_dim, turned=self.undoes) | self.mix.slots(copies)
        if self.kept is not None:
            slots |= self.kept.slots(value_dim)
        return slots

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call | None = None) -> Tensor:
        """Attend to the new tokens and to those in the call's state, and put the new ones there.

        Args:
            q: Queries ``[B, H, T, D]``.
            k: Keys of the new tokens ``[B, HKV, T, D]``.
            v: Values of the new tokens ``[B, HKV, T, V]``.
            call: What belongs to this call.

        Returns:
            ``o [B, H, T, V]``.

        Raises:
            UnsupportedError: If attention with a window, or with a rule that goes by the order of keys, is not causal.
        """
        call = Call() if call is None else call
        if not call.causal:
            self._refuse_bidirectional()
        if call.rotation is not None and (self.window is None or not self.undoes):
            if self.undoes:
                q, k = (call.rotation.undo(x, self.settings.backend) for x in (q, k))
            call = call._replace(rotation=None)
        if call.state is not None:
            ready, o = call.state.ready, None
            if ready is not None:
                o = ready.step_(self, q, k, v, call, call.state)
            if o is None and self.shard is None and steps(self, q, call):
                o = step_(self, q, k, v, call)
            if o is not None:
                stepped: Tensor = o
                return stepped
        if call.key_mask is not None:
            # What is masked must not matter, whatever it holds.
            hidden = ~call.key_mask[:, None, :, None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        if self.shard is not None:
            return self.shard.attend(self, q, k, v, call)
        if self.window is not None and call.cu_seqlens is not None:
            return packed(self, q, k, v, call)
        return self.attend(q, k, v, call)

    def _refuse_bidirectional(self) -> None:
        if self.rule.ordered:
            raise UnsupportedError(
                "update_rule",
                "be 'additive' for bidirectional attention",
                self.settings.update_rule,
                "Others go by the order of keys: use that one, or leave this layer out with layers=.",
                where=self.name,
            )
        if self.window is not None:
            raise UnsupportedError(
                "window",
                "be None for bidirectional attention",
                self.settings.window,
                "Leave the window out, or this layer with layers=.",
                where=self.name,
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, keep: bool = True) -> Tensor:
        """Attend as :meth:`forward` does, in texts that are rows of a batch, or packed where there is no window.

        ``keep`` says whether the new tokens are put into the call's state.
        """
        whole = self.split(q, k, v, call)
        held = {} if call.state is None else call.state.read()
        before = {name: x for name, x in held.items() if not name.startswith(("near_", "kept_", "seen"))}
        o, carried = read_whole(self, whole, before or None)
        if call.state is not None and keep:
            self._keep(whole, carried, v, call.state)
        return o

    @property
    def reach(self) -> int:
        """How far back a query's keys begin, those included that leave the window with it."""
        return 0 if self.window is None else self.window.size

    @property
    def elementwise(self) -> str | None:
        """Name of the map that the rule applies by itself; None where it is given features."""
        kernel = self.feature_map.kernel
        return None if kernel is None or not self.rule.maps or self.feature_map.hooked else kernel

    def scaling(self, call: Call) -> float:
        """Return the factor on ``q.k`` in softmax attention."""
        return self.sizes.scaling if call.scaling is None else call.scaling

    def weights(self, owner: Part) -> dict[str, Tensor]:
        """Return what the mix, the rule or the choice of kept keys has learned, by its names."""
        return {name: getattr(self, f"{owner}_{name}") for name in self.learned[owner]}

    def gates(self, k: Tensor, v: Tensor) -> Gates | None:
        """Return the rule's gates for keys as the linear branch reads them; None where it learns nothing."""
        return self.rule.gates(k, v, self.weights("rule")) if self.learned["rule"] else None

    def split(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Piece:
        """Put what a call of :meth:`attend` reads side by side: all of it is one piece."""
        state = call.state
        seen = None if state is None else state.tensors.get("seen")
        positions = positions_of(q, call.key_mask, seen)
        parts = q, k, v, call.key_mask, positions, None, None, self.scaling(call), call.causal, call.cu_seqlens
        piece = Piece(*parts, rotation=call.rotation, carries=state is not None)
        if self.window is None:
            return piece
        unread = state is None or not state.first_read
        tokens = self.window.open(k, v, call.key_mask, positions if unread else None, state, call.rotation)
        number, past, before = None, tokens.k.shape[2] - q.shape[2], None
        counts = tokens.counted()
        if state is not None and seen is not None and (self.mix.has_far or self.kept is not None):
            # All that were seen are beyond the window but for those that it holds, and the sinks.
            before = seen - counts[:, :past].sum(1) - state.tensors["near_mask"][:, : self.window.sinks].sum(1)
        if self.mix.has_far and (tokens.first or tokens.counts is None):
            number = number_beyond(q.device, len(q), q.shape[2], self.window.size, self.window.sinks)
        elif self.mix.has_far:
            left = max(tokens.k.shape[2] - self.window.size, 0)
            number = running_sum(counts[:, :left].long(), q.shape[2] - left, before)
        if tokens.counts is not None and past:
            # Of the tokens held, the last is the last that was seen, and no sink stands behind one that counts. Where
            # nothing was seen they are none, in a graph for every length.
            later = tokens.counts[:, :past].flip(1).cumsum(1).flip(1)
            last = positions.new_zeros(len(q), 1) if seen is None else seen[:, None]
            positions = torch.cat([(last - later).clamp(min=0), positions], 1)
        piece = piece._replace(tokens=tokens, number=number, key_positions=positions)
        if self.kept is None:
            return piece
        before = positions.new_zeros(len(q)) if before is None else before
        return self.keeps(piece, before, state.tensors if state is not None and state.tensors else None)

    def keeps(self, piece: Piece, before: Tensor, held: Mapping[str, Tensor] | None) -> Piece:
        """Choose the keys that are kept beyond the windows of a call, where any are.

        ``before [B]`` int64 counts the keys that had left the window before; ``held`` is None where nothing was read.
        """
        kept, window, tokens, positions = self.kept, self.window, piece.tokens, piece.key_positions
        if kept is None or window is None or tokens is None or positions is None:
            return piece
        number = None if piece.number is None else (piece.number - kept.size).clamp(min=0)
        count, backend, weights = piece.q.shape[2], self.settings.backend, self.weights("retention")
        beyond = kept.open(tokens, positions, count, before, held, weights, backend)
        return piece._replace(number=number, beyond=beyond)

    def read(self, piece: Piece, carried: Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from the queries of a piece: return ``o [B, H, T, V]``, and what the linear branch carries on.

        What is ``carried`` from the piece before is None where there is none.
        """
        if piece.tokens is None or self.window is None:
            mask, positions = piece.mask, piece.positions
            phi_q, phi_k, kernel = self._features(piece.q, piece.k, positions, positions)
            gates = self.gates(piece.k, piece.v)
            asked = RuleCall(phi_q, phi_k, piece.v, gates, kernel, mask, piece.cu_seqlens, piece.causal)
            found = self.rule.read(asked, carried)
            return found.o, found.state
        tokens, count = piece.tokens, piece.q.shape[2]
        size, backend = self.window.size, self.settings.backend
        sinks = None if "sinks" in self.disabled else piece.sinks(size)
        kept = None if piece.beyond is None or "kept" in self.disabled else piece.beyond.exact()
        near = Near(piece.q, tokens.k, tokens.v, tokens.mask, sinks, size, piece.scaling, backend, kept)
        if not self.mix.has_far:
            return near.attend(), {}
        far, carried = (
            self._read_far(piece, tokens, count, carried)
            if piece.beyond is None
            else self._read_folded(piece, piece.beyond.folded(backend), carried)
        )
        if "window" in self.disabled:
            return far.o, carried
        if "linear" in self.disabled:
            return near.attend(), carried
        return self.mix.join(near, far, self.weights("mix")), carried

    def _read_far(
        self, piece: Piece, tokens: Tokens, count: int, carried: Mapping[str, Tensor] | None
    ) -> tuple[Far, dict[str, Tensor]]:
        """Read the linear branch: the keys that leave the window, which is where they begin a window earlier."""
        if self.window is None or piece.number is None or piece.key_positions is None:
            raise RuntimeError("there is no linear branch beside a window")
        # Keys that lag by the window lag by nothing where they begin a window earlier.
        left = tokens.k.shape[2] - self.window.size
        delay, left = count - left, max(left, 0)
        q, k, v = piece.q, tokens.k[:, :, :count], tokens.v[:, :, :count]
        of_q, of_k = piece.rotation, None if tokens.rotation is None else tokens.rotation.cut(0, count)
        # More than features is made of them: gates, or a map that the rule applies.
        plain = bool(self.learned["rule"]) or self.elementwise is not None
        if of_q is not None and of_k is not None and plain:
            backend = self.settings.backend
            q, k, of_q, of_k = of_q.undo(q, backend), of_k.undo(k, backend), None, None
        mask = None if tokens.counts is None else tokens.counts[:, :count]
        phi_q, phi_k, kernel = self._features(q, k, piece.positions, piece.key_positions[:, :count], of_q, of_k)
        with_mass = "mass" in self.mix.needs
        asked = RuleCall(phi_q, phi_k, v, self.gates(k, v), kernel, mask, delay=delay, with_mass=with_mass)
        found = self.rule.read(asked, carried)
        gone = tokens.k[:, :, :left]
        gone = gone if tokens.counts is None else gone.masked_fill(~tokens.counts[:, None, :left, None], 0)
        sums, summed = self._key_sums(gone, carried)
        return Far(found.o, piece.number, tokens.counted(), found.mass, sums), found.state | summed

    def _read_folded(
        self, piece: Piece, folded: Folded, carried: Mapping[str, Tensor] | None
    ) -> tuple[Far, dict[str, Tensor]]:
        """Read the linear branch of a layer that keeps keys: those that go, each when it does."""
        if piece.number is None:
            raise RuntimeError("there is no linear branch beside a window")
        q = piece.q if piece.rotation is None else piece.rotation.undo(piece.q, self.settings.backend)
        phi_q, phi_k, kernel = self._features(q, folded.k, piece.positions, folded.positions)
        with_mass, gates = "mass" in self.mix.needs, self.gates(folded.k, folded.v)
        found = self.rule.read(
            RuleCall(phi_q, phi_k, folded.v, gates, kernel, folded.mask, with_mass=with_mass), carried
        )
        sums, summed = self._key_sums(folded.raw, carried)
        return Far(found.o, piece.number, folded.mask, found.mass, sums, folded.raw), found.state | summed

    def _key_sums(self, gone: Tensor, carried: Mapping[str, Tensor] | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the sums of the keys beyond the window before and after these, where the mix reads them."""
        if not self.mix.sums_keys:
            return None, {}
        sums = None if carried is None else carried["far_keys"]
        total = gone.sum(2, dtype=torch.promote_types(gone.dtype, torch.float32))
        return sums, {"far_keys": total if sums is None else total + sums}

    def _features(
        self,
        q: Tensor,
        k: Tensor,
        positions_q: Tensor,
        positions_k: Tensor,
        of_q: Rotation | None = None,
        of_k: Rotation | None = None,
    ) -> tuple[Tensor, Tensor, str | None]:
        """Return features of queries and keys, or both as they are and the map that the rule is to apply."""
        kernel = self.elementwise
        if kernel is not None and not (self.window is not None and "mass" in self.mix.needs):
            return q, k, kernel
        backend = self.settings.backend
        phi_q = features_of(self.feature_map, q, "q", positions_q, backend, of_q)
        return phi_q, features_of(self.feature_map, k, "k", positions_k, backend, of_k), None

    def _keep(self, whole: Piece, carried: Mapping[str, Tensor], v: Tensor, state: State) -> None:
        """Put into the call's state what was read."""
        batch, _, count, _ = whole.q.shape
        kept = dict(carried)
        if self.window is not None and whole.tokens is not None:
            kept |= self.window.close(whole.tokens, count, state)
        if whole.beyond is not None:
            kept |= whole.beyond.close(self.sizes.head_dim)
        state.allocate(self.slots(v.shape[3], v.device), batch, v, kept)
        new = whole.mask.sum(1) if whole.mask is not None else count
        kept["seen"] = state.tensors["seen"] + new
        state.write(kept)
        state.advance(count, v.device, masked=whole.mask is not None)
        self.look_for_sinks(state, count)

    def look_for_sinks(self, state: State, tokens: int) -> None:
        """Note when every row has read its sinks; where there is padding ask only now and then, since that waits."""
        if state.first_read or isinstance(state.length, Tensor) or self.window is None or torch.compiler.is_compiling():
            return
        if not self.window.sinks or not state.padded:
            state.first_read = state.length >= self.window.sinks
        elif not state.tensors["seen"].is_meta and (tokens > 1 or state.length % self.window.size == 0):
            state.first_read = bool((state.tensors["seen"] >= self.window.sinks).all())
