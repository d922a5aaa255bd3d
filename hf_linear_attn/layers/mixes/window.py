"""No linear branch: the baseline that a conversion has to beat."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from hf_linear_attn.layers.mixes.base import Far, LastToken, Mix, Near


class WindowAlone(Mix):
    """Attend to the window and the sinks alone."""

    name: ClassVar[str] = "window"
    has_far: ClassVar[bool] = False
    steps: ClassVar[bool] = True

    @override
    def join(self, near: Near, far: Far | None, weights: Mapping[str, Tensor]) -> Tensor:
        return near.attend()

    @override
    def join_last(self, last: LastToken, weights: Mapping[str, Tensor]) -> Tensor:
        return last.attend()
