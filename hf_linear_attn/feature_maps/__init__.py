"""Feature maps: the functions phi in ``phi(q)^T phi(k)``.

Each module of this package registers its maps when imported; a new family is one new file here.
"""

import importlib
import pkgutil

from hf_linear_attn.feature_maps.base import (
    FeatureMap,
    available_feature_maps,
    feature_map_class,
    get_feature_map,
    load_feature_maps,
    register_feature_map,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "FeatureMap",
    "available_feature_maps",
    "feature_map_class",
    "get_feature_map",
    "load_feature_maps",
    "register_feature_map",
]
