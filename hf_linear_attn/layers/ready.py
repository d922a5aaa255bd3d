"""A state's next step by a loop on the CPU, with all that stays from token to token looked up."""

from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_linear_attn.ops.step import HybridStep

if TYPE_CHECKING:
    from hf_linear_attn.layers.attention import Call, LinearAttention
    from hf_linear_attn.layers.state import State


class Ready:
    """A step that a layer has taken and can take again, as long as nothing is replaced that it was made of.

    Args:
        layer: The layer.
        state: The state.
        call: The call.
        whole: Its step.
    """

    # Without a dictionary, so that nobody takes what is looked up for a part of the state.
    __slots__ = ("_addresses", "_layer", "_layout", "_run", "_scaling", "_tensors")

    def __init__(self, layer: "LinearAttention", state: "State", call: "Call", whole: HybridStep) -> None:
        # Imported here so that the package needs no Numba.
        from hf_linear_attn.ops.step.numba import LoopedStep

        self._run = LoopedStep(whole)
        self._layer, self._tensors = layer, tuple(state.tensors.values())
        # Nothing else comes to lie there while the loop holds what is learned.
        self._addresses = [x.data_ptr() for x in _learned(layer)]
        self._layout, self._scaling = _layout(whole.q, whole.k, whole.v, call), call.scaling

    @classmethod
    def of(cls, layer: "LinearAttention", state: "State", call: "Call", whole: HybridStep) -> "Ready | None":
        """Make a step ready; None where it reads copies of what is learned, or the host does not count the tokens."""
        own = {x.untyped_storage().data_ptr() for x in _learned(layer)}
        read = [x for x in whole.learned if x is not None]
        same = all(x.untyped_storage().data_ptr() in own and x.is_contiguous() for x in read)
        return cls(layer, state, call, whole) if same and not isinstance(state.length, Tensor) else None

    def serves(self, layer: "LinearAttention", state: "State", q: Tensor, k: Tensor, v: Tensor, call: "Call") -> bool:
        """Tell whether a call is such a step."""
        return (
            layer is self._layer
            and call.scaling == self._scaling
            and len(state.tensors) == len(self._tensors)
            and all(map(is_, state.tensors.values(), self._tensors))
            and [x.data_ptr() for x in _learned(layer)] == self._addresses
            and _layout(q, k, v, call) == self._layout
        )

    def step_(self, q: Tensor, k: Tensor, v: Tensor, call: "Call", state: "State") -> Tensor:
        """Take the step; arguments as of :meth:`LinearAttention.forward`."""
        turns = None if call.rotation is None else call.rotation.turns
        return self._run(q, k, v, call.key_mask, turns, int(state.length))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copy to nothing: the tensors of a state's copy lie elsewhere."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as nothing, for the same reason."""
        return type(None), ()


def _learned(layer: "LinearAttention") -> list[Tensor]:
    """Return what a layer has learned, without a look at modules' attributes, which takes long."""
    return [
        x for module in (layer, layer.feature_map) for x in module.__dict__["_parameters"].values() if x is not None
    ]


def _layout(q: Tensor, k: Tensor, v: Tensor, call: "Call") -> tuple[Any, ...]:
    """Return what is alike in all steps of new tokens; addresses and strides a loop is told each time."""
    rotation = call.rotation
    of_turns = None if rotation is None else (rotation.turns.shape, rotation.layout)
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, call.key_mask is None, of_turns
