"""Rules that choose which keys are kept beyond the window; a new one is one new file here."""

from hf_linear_attn.layers.registry import discover
from hf_linear_attn.layers.retention.base import Retention

RETENTIONS = discover(__name__, __path__, Retention)  # type: ignore[type-abstract]

__all__ = ["RETENTIONS", "Retention"]
