"""What a layer with a window reads in one call of a kernel or of a loop: a step, and text without gradients."""

from collections.abc import Container, Mapping
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.layers.call import Call, Layer, Piece
from hf_linear_attn.layers.kept import Beyond
from hf_linear_attn.layers.state import State
from hf_linear_attn.layers.window import Tokens, Window
from hf_linear_attn.ops.dispatch import wants_kernels, wants_loops, warn_fallback
from hf_linear_attn.ops.hybrid import (
    KEEPS,
    PREFILLS,
    STEPS,
    HybridStep,
    KeptPrefill,
    KeptStep,
    Prefill,
    hybrid_obstacle,
    hybrid_prefill,
    hybrid_step_,
    hybrid_train,
    prefill_obstacle,
)
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.tracing import is_transformed

FusedBackend = Literal["triton", "numba"]
"""What reads in one call: kernels on a GPU, loops on a CPU."""

Computed = tuple[str, Pair | None, Pair | None]
"""The name of a feature map and, of a paired one, what is learned for queries and for keys."""


def fused_step_(
    chosen: FusedBackend, layer: Layer, window: Window, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State
) -> Tensor | None:
    """Take a step in one call of a kernel or a loop, and count its token; None where the one chosen does not."""
    whole = for_kernel(chosen, layer, window, q, k, v, call, state.tensors, state.tensors["seen"], state.length)
    if whole is None:
        return None
    if chosen == "numba":
        state.ready = Ready.of(layer, state, call, whole)
        o: Tensor | None = None if state.ready is None else state.ready.step_(layer, q, k, v, call, state)
        if o is not None:
            return o
    if call.rotation is not None:
        state.check_common("near_turns", steps=True)
    o = hybrid_step_(whole, chosen)
    count_(whole.seen, call.key_mask)
    # It tells sinks by the number of tokens seen.
    state.advance(1, q.device, masked=call.key_mask is not None)
    return o


def count_(seen: Tensor, real: Tensor | None) -> None:
    """Count a new token ``[B]``, where it is real ``[B, 1]``."""
    seen.add_(1 if real is None else real[:, 0])


def for_kernel(
    chosen: FusedBackend,
    layer: Layer,
    window: Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    tensors: Mapping[str, Tensor],
    seen: Tensor,
    length: Tensor | int,
    rows: Tensor | None = None,
) -> HybridStep | None:
    """Return the step as kernels and loops take it; None where those chosen do not; see :class:`HybridStep`."""
    computed = _map_of(layer)
    reason = why_not(layer, computed, STEPS, KEEPS)
    if reason is None:
        step = HybridStep(
            q=q,
            k=k,
            v=v,
            key_mask=call.key_mask,
            seen=seen,
            place=length if isinstance(length, Tensor) else None,
            length=0 if isinstance(length, Tensor) else length,
            rows=rows,
            kv=tensors.get("kv"),
            z=tensors.get("z"),
            far_keys=tensors.get("far_keys"),
            near_k=tensors["near_k"],
            near_v=tensors["near_v"],
            near_mask=tensors.get("near_mask"),
            near_turns=None if call.rotation is None else tensors["near_turns"],
            mix=layer.mix.name,
            sinks=window.sinks,
            scaling=layer.scaling(call),
            eps=layer.rule.eps,
            kept=_kept(layer, tensors),
            **_learned(layer, computed, call.rotation),
        )
        reason = hybrid_obstacle(step, chosen)
        if reason is None:
            return step
    if chosen == "triton":
        warn_fallback(f"{reason}, so that a step is many operations")
    return None


def _kept(layer: Layer, tensors: Mapping[str, Tensor]) -> KeptStep | None:
    """Return what a step is told of the keys that are kept beyond the window."""
    if layer.kept is None:
        return None
    return KeptStep(
        k=tensors["kept_k"],
        v=tensors["kept_v"],
        at=tensors["kept_at"],
        turns=tensors.get("kept_turns"),
        nearest=tensors.get("kept_nearest"),
        scores=tensors.get("kept_scores"),
        weights=tuple(layer.weights("retention").values()),
        ahead=layer.kept.retention.ahead,
    )


def _learned(layer: Layer, computed: Computed | None, rotation: Rotation | None) -> dict[str, Any]:
    """Return what a step is told of a layer's map, rule and mix, and of the rotation, by its names."""
    phi, of_q, of_k = computed or ("identity", None, None)
    found: dict[str, Any] = {"phi": phi, "factor": 1.0, "sharpness": 0.0}
    found |= dict.fromkeys(("weight_q", "power_q", "weight_k", "power_k"))
    if of_q is not None and of_k is not None:
        found |= {"weight_q": of_q.weight, "power_q": of_q.power, "weight_k": of_k.weight, "power_k": of_k.power}
        found |= {"factor": of_q.factor, "sharpness": of_q.sharpness}
    weights, of_rule = layer.weights("mix"), layer.weights("rule")
    found |= {name: weights.get(name) for name in ("bias", "weight")}
    found |= {name: of_rule.get(name) for name in ("decay_bias", "decay_key", "decay_value")}
    if rotation is None:
        return found | {"turns": None, "pairs": "half", "at_end": False}
    return found | {"turns": rotation.turns, "pairs": rotation.layout.pairs, "at_end": rotation.layout.at_end}


def why_not(
    layer: Layer, computed: Computed | None, known: Container[tuple[str, str]], keepers: Container[str] = ()
) -> str | None:
    """Say why a layer, whose map is ``computed``, is not read in one call; None where only its tokens could be why.

    Update rules with mixes that are ``known`` are read so, and keys kept by one of the ``keepers``.
    """
    rule, mix = layer.rule.name, layer.mix.name
    if layer.kept is not None and layer.kept.retention.name not in keepers:
        return f"no kernel keeps keys beyond the window by {layer.kept.retention.name!r}"
    if (rule, mix) not in known:
        return f"no kernel reads the update rule {rule!r} with the mix {mix!r}"
    if computed is None:
        return f"no kernel computes the feature map {type(layer.feature_map).__name__} with its hooks, if it has any"
    return None


def fused_backend(backend: str, device: torch.device) -> FusedBackend | None:
    """Return what computes a whole step, or a whole text, in one call, if anything does."""
    if backend in ("torch", "reference"):
        return None
    if wants_kernels(backend, device):
        return "triton"
    # What traces, transforms or counts operations is to see them.
    return "numba" if wants_loops(backend, device) and not is_transformed() else None


def _map_of(layer: Layer) -> Computed | None:
    """Return how a kernel or a loop computes a layer's map; None where PyTorch alone does."""
    feature_map = layer.feature_map
    if not layer.mix.has_far:
        return "identity", None, None
    if feature_map.hooked:
        return None
    if feature_map.kernel is not None:
        return feature_map.kernel, None, None
    of_q, of_k = feature_map.pair("q"), feature_map.pair("k")
    return None if of_q is None or of_k is None else (of_q.name, of_q, of_k)


def fused_prefill(
    layer: Layer, piece: Piece, carried: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Attend as :meth:`LinearAttention.read` does; None where that has to do it."""
    chosen, tokens, window = fused_backend(layer.settings.backend, piece.q.device), piece.tokens, layer.window
    trains = torch.is_grad_enabled()
    if chosen is None or layer.disabled:
        return None
    if trains and (chosen != "triton" or piece.carries or carried):
        # What is carried may have gradients.
        return None
    computed = _map_of(layer)
    reason = why_not(layer, computed, PREFILLS[chosen], KEEPS if chosen == "numba" else ())
    if reason is not None and chosen == "triton" and not (trains or (layer.rule.steps and layer.mix.steps)):
        # Others fall back on kernels for each part, or say it where they step.
        warn_fallback(f"{reason}, and a step is read as a text of one token")
    if computed is None or tokens is None or window is None or reason is not None:
        return None
    _, of_q, of_k = computed
    if prefill_obstacle(piece.q, tokens.k, tokens.v, of_q, of_k, window.size, chosen, trains=trains) is not None:
        return None
    whole = _prefill_of(layer, computed, piece, tokens, window, carried or {})
    if whole.decay_value is not None and whole.decay_value.shape[1] != tokens.v.shape[3]:
        # The rule says what is wrong.
        return None
    of_keys = None if tokens.rotation is None else tokens.rotation.cut(0, piece.q.shape[2])
    if trains and of_k is not None:
        return hybrid_train(whole, of_k, of_keys, first=tokens.first), {}
    found = hybrid_prefill(whole, of_k, of_keys, chosen)
    sums = {"kv": found.kv, "z": found.z} if layer.mix.has_far else {}
    return found.o, sums | {"far_keys": found.far_keys} if layer.mix.sums_keys else sums


def _prefill_of(
    layer: Layer,
    computed: Computed,
    piece: Piece,
    tokens: Tokens,
    window: Window,
    carried: Mapping[str, Tensor],
) -> Prefill:
    """Return a piece as kernels and loops take it."""
    sink_k, sink_v, seen = piece.sinks(window.size) or (None, None, None)
    if sink_k is not None and sink_v is not None:
        # A cache holds them in the dtype in which they were read.
        sink_k, sink_v = sink_k.to(piece.q.dtype), sink_v.to(piece.q.dtype)
    learned = _learned(layer, computed, piece.rotation)
    # The keys' features are computed apart.
    del learned["weight_k"], learned["power_k"]
    return Prefill(
        q=piece.q,
        k=tokens.k,
        v=tokens.v,
        phi_k=None,
        key_mask=tokens.mask,
        counts=tokens.counts,
        sink_k=sink_k,
        sink_v=sink_v,
        seen=seen,
        number=piece.number,
        far_keys=carried.get("far_keys"),
        kv=carried.get("kv"),
        z=carried.get("z"),
        window=window.size,
        scaling=piece.scaling,
        eps=layer.rule.eps,
        mix=layer.mix.name,
        kept=None if piece.beyond is None else _kept_prefill(piece.beyond, piece.q.dtype, layer.mix.has_far),
        **learned,
    )


def _kept_prefill(beyond: Beyond, dtype: torch.dtype, has_far: bool) -> KeptPrefill:
    """Return the keys beyond the windows of a piece as loops take them."""
    places = beyond.k.shape[2] - beyond.enters.shape[1]
    k, v = (x[:, :, :places].to(dtype) for x in (beyond.k, beyond.v))
    kept = KeptPrefill(k, v, beyond.choice.slot, beyond.number)
    if not has_far:
        return kept
    k, v, mask, turns = beyond.gone()
    return kept._replace(gone=k.to(dtype), gone_v=v.to(dtype), gone_mask=mask, gone_turns=turns)


class Ready:
    """A step that a layer has taken and can take again, as long as nothing is replaced that it was made of.

    What does not change while a layer is used was looked at when it was made. All else is, each time: at every token
    of every layer the host waits for this, so nothing here is done twice.
    """

    # Without a dictionary, so that what is looked up is not taken for a part of the state.
    __slots__ = ("_addresses", "_inference", "_layer", "_layout", "_learned", "_map", "_run", "_scaling", "_tensors")

    def __init__(self, layer: Any, state: State, call: Call, whole: HybridStep) -> None:
        # Imported here so that the package needs no Numba.
        from hf_linear_attn.ops.hybrid.numba.step import LoopedStep

        self._run = LoopedStep(whole)
        self._layer, self._tensors = layer, tuple(state.tensors.values())
        # What was made under inference_mode can be changed in place only there.
        self._inference = whole.seen.is_inference()
        # Modules' own tables: to ask modules for their attributes takes long.
        self._map, self._learned = layer.feature_map, (layer._parameters, layer.feature_map._parameters)
        # Nothing else comes to lie there while the loop holds what is learned.
        self._addresses = self._found()
        self._layout, self._scaling = _layout(whole.q, whole.k, whole.v, call), call.scaling

    @classmethod
    def of(cls, layer: Any, state: State, call: Call, whole: HybridStep) -> "Ready | None":
        """Make a step ready; None where it reads copies of what is learned, or the host does not count the tokens."""
        own = {x.untyped_storage().data_ptr() for x in (*layer.parameters(False), *layer.feature_map.parameters(False))}
        read = [x for x in whole.learned if x is not None]
        same = all(x.untyped_storage().data_ptr() in own and x.is_contiguous() for x in read)
        return cls(layer, state, call, whole) if same and not isinstance(state.length, Tensor) else None

    def step_(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State) -> Tensor | None:
        """Take the step, and count its token; None where the call is not such a step.

        Arguments are as of :meth:`LinearAttention.forward`. What traces, transforms or counts operations is to see
        them.
        """
        serves = (
            not is_transformed()
            and layer is self._layer
            and not layer.disabled
            and layer.shard is None
            and call.in_place
            and call.scaling == self._scaling
            and not is_grad_enabled()
            and (not self._inference or is_inference_mode_enabled())
            and len(state.tensors) == len(self._tensors)
            and all(map(is_, state.tensors.values(), self._tensors))
            and _layout(q, k, v, call) == self._layout
            and layer._modules["feature_map"] is self._map
            and not self._map.hooked
            and self._found() == self._addresses
        )
        if not serves:
            return None
        turns, length = None, int(state.length)
        if call.rotation is not None:
            state.check_common("near_turns", steps=True)
            turns = call.rotation.turns
        o = self._run(q, k, v, call.key_mask, turns, length, counts=True)
        state.length = length + 1
        state.padded |= call.key_mask is not None
        return o

    def _found(self) -> list[Any]:
        """Return where lies what the layer has learned, how it lies there, the numbers beside it, and the state."""
        found = [self._map.scale, self._map.scaling, self._layer.rule.eps, *map(Tensor.data_ptr, self._tensors)]
        for table in self._learned:
            for x in table.values():
                if x is not None:
                    found += x.data_ptr(), x.stride()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copy to nothing: the tensors of a state's copy lie elsewhere."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as nothing, for the same reason."""
        return type(None), ()


def _layout(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Any, ...]:
    """Return what is alike in all steps of new tokens; addresses a loop is told each time."""
    rotation, masked = call.rotation, call.key_mask is not None
    of_tokens = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, masked
    return of_tokens if rotation is None else (*of_tokens, rotation.turns.shape, rotation.layout)
