"""Stages of training, one file each: what it trains, its steps, the lengths of its sequences, and its loss.

Each module of this package registers its stage when imported; a new stage is one new file here.
"""

import importlib
import pkgutil

from hf_linear_attn.distill.registry import available_stages, register_stage, stage_class
from hf_linear_attn.distill.stages.base import Stage


def discover() -> None:
    """Import every module of this package."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


discover()

__all__ = ["Stage", "available_stages", "discover", "register_stage", "stage_class"]
