"""The suites that ship: every module of this folder that defines one registers it.

A new suite is one file with a class decorated by `hf_linear_attn.evaluation.suite.register_suite`.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
