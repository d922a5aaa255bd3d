"""What every rule has that chooses which keys are kept beyond the window."""

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from hf_linear_attn.layers.rules import Sizes
from hf_linear_attn.layers.window import Tokens


class Retention(ABC):
    """A rule for layers of some sizes, with W tokens in sight; a subclass is found by its :attr:`name`.

    Args:
        sizes: The layer's.
        window: W.
        units: Of a net, where the rule has one.
    """

    name: ClassVar[str]
    """The word by which users ask for it."""
    scores: ClassVar[bool] = False
    """Whether it has :meth:`score`. Without it the key goes whose value a later one's has come closest to."""
    reads_keys: ClassVar[bool] = False
    """Whether it reads keys, with their rotation undone where that is asked for."""
    ahead: int = 0
    """Tokens behind a key that its scores are made of, too."""

    def __init__(self, sizes: Sizes, window: int, units: int) -> None:
        self.sizes, self.window, self.units = sizes, window, units

    def weights(self) -> dict[str, Tensor]:
        """Return what is learned, as it starts; layers hold it as ``retention_bias`` and the like."""
        return {}

    def score(self, tokens: Tokens, count: int, weights: Mapping[str, Tensor], backend: str) -> Tensor:
        """Return scores of the first keys of a call, which leave the window in it, ``[B, HKV, count, 6]``.

        The key with the least score for its age goes; see :data:`hf_linear_attn.ops.kept.AGES`. Behind each of the
        first tokens lie those of the window that it leaves.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scores")
