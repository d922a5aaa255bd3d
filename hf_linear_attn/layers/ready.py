"""A state's next step by a loop on the CPU, with all that stays from token to token looked up."""

from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from hf_linear_attn.ops.library import is_transformed
from hf_linear_attn.ops.step import HybridStep

if TYPE_CHECKING:
    from hf_linear_attn.layers.attention import Call, LinearAttention
    from hf_linear_attn.layers.state import State


class Ready:
    """A step that a layer has taken and can take again, as long as nothing is replaced that it was made of.

    What does not change while a layer is used was looked at when it was made. All else is, each time: at every token
    of every layer the host waits for this, so nothing here is done twice.

    Args:
        layer: The layer.
        state: The state.
        call: The call.
        whole: Its step.
    """

    # Without a dictionary, so that nobody takes what is looked up for a part of the state.
    __slots__ = ("_addresses", "_inference", "_layer", "_layout", "_learned", "_map", "_run", "_scaling", "_tensors")

    def __init__(self, layer: "LinearAttention", state: "State", call: "Call", whole: HybridStep) -> None:
        # Imported here so that the package needs no Numba.
        from hf_linear_attn.ops.step.numba import LoopedStep

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
    def of(cls, layer: "LinearAttention", state: "State", call: "Call", whole: HybridStep) -> "Ready | None":
        """Make a step ready; None where it reads copies of what is learned, or the host does not count the tokens."""
        own = {x.untyped_storage().data_ptr() for x in (*layer.parameters(False), *layer.feature_map.parameters(False))}
        read = [x for x in whole.learned if x is not None]
        same = all(x.untyped_storage().data_ptr() in own and x.is_contiguous() for x in read)
        return cls(layer, state, call, whole) if same and not isinstance(state.length, Tensor) else None

    def serves(self, layer: "LinearAttention", q: Tensor, k: Tensor, v: Tensor, call: "Call") -> bool:
        """Tell whether a call is such a step; what traces, transforms or counts operations is to see them."""
        state = call.state
        return (
            state is not None
            and not is_transformed()
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

    def _found(self) -> list[Any]:
        """Return where lies what the layer has learned, how it lies there, the numbers beside it, and the state."""
        state = [x.data_ptr() for x in self._tensors]
        learned = [(x.data_ptr(), x.stride()) for table in self._learned for x in table.values() if x is not None]
        return [*state, *learned, self._map.scale, self._map.scaling, self._layer.rule.eps]

    def step_(self, q: Tensor, k: Tensor, v: Tensor, call: "Call", state: "State") -> Tensor:
        """Take the step, and count its token; arguments as of :meth:`LinearAttention.forward`."""
        turns, length = None, int(state.length)
        if call.rotation is not None:
            state.check_common("near_turns", steps=True)
            turns = call.rotation.turns
        o = self._run(q, k, v, call.key_mask, turns, length, counts=True)
        state.length = length + 1
        state.padded |= call.key_mask is not None
        return o

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copy to nothing: the tensors of a state's copy lie elsewhere."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as nothing, for the same reason."""
        return type(None), ()


def _layout(q: Tensor, k: Tensor, v: Tensor, call: "Call") -> tuple[Any, ...]:
    """Return what is alike in all steps of new tokens; addresses a loop is told each time."""
    rotation, masked = call.rotation, call.key_mask is not None
    of_tokens = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, masked
    return of_tokens if rotation is None else (*of_tokens, rotation.turns.shape, rotation.layout)
