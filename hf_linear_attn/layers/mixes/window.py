"""No linear branch: the baseline that a conversion has to beat."""

from typing import ClassVar

from hf_linear_attn.layers.mixes.base import Mix


class WindowAlone(Mix):
    """Attend to the window and the sinks alone."""

    name: ClassVar[str] = "window"
    has_far: ClassVar[bool] = False
    steps: ClassVar[bool] = True
