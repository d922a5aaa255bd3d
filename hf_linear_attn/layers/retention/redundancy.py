"""What is said again later goes first."""

from typing import ClassVar

from hf_linear_attn.layers.retention.base import Retention


class Redundancy(Retention):
    """Let the key go whose value that of a later one has come closest to. Nothing is learned."""

    name: ClassVar[str] = "redundancy"
