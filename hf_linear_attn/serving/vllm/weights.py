"""Where the weights of a converted layer go."""

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from hf_linear_attn.errors import CheckpointError

MARK = ".linear_attention."


def key_of(name: str) -> tuple[int, str]:
    """Return a converted layer's number and the weight's own name: what is before it differs from software to software.

    Raises:
        CheckpointError: If the name has no number.

    Example:
        >>> key_of("transformer.h.3.attn.linear_attention.mix_bias")
        (3, 'mix_bias')
    """
    before, _, weight = name.partition(MARK)
    number = re.search(r"\.(\d+)\.", f".{before}.")
    if number is None:
        raise CheckpointError("weights", "name the layer that they belong to", name, "Save the model again.")
    return int(number[1]), weight


def take_own(
    weights: Iterable[tuple[str, Tensor]], own: Mapping[tuple[int, str], Tensor], rank: int, ranks: int
) -> Iterator[tuple[str, Tensor]]:
    """Load what belongs to converted layers, and pass on the weights of all other modules.

    ``own`` tensors are filled, by layer and name, with the heads of this one of the ranks.

    Raises:
        CheckpointError: If one is missing, has no place, or does not fit.
    """
    missing = set(own)
    for name, x in weights:
        if MARK not in name:
            yield name, x
            continue
        key = key_of(name)
        if key not in own:
            raise CheckpointError("weights", "belong to layers that config.json converts", name, "Save it again.")
        own[key].copy_(_of_rank(x, own[key], rank, ranks, name))
        missing.discard(key)
    if missing:
        number, weight = min(missing)
        raise CheckpointError("weights", "be those of a converted folder", f"no {weight}", "Save it again.",
                              where=f"layer {number}")  # fmt: skip


def _of_rank(x: Tensor, own: Tensor, rank: int, ranks: int, name: str) -> Tensor:
    """Return a rank's share of a weight: where it has heads, they come first; ranks may share a key head."""
    if x.shape == own.shape:
        return x
    if x.ndim != own.ndim or x.shape[1:] != own.shape[1:] or len(x) < len(own):
        raise CheckpointError("weights", f"have shape {tuple(own.shape)}", tuple(x.shape), "Save it again.", where=name)
    return x.narrow(0, rank * len(x) // ranks, len(own))
