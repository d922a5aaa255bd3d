"""Generated retrieval tasks: every module of this folder that defines one registers it.

A new task is one file with a class decorated by `register_task`.
"""

from importlib import import_module
from pkgutil import iter_modules

from hf_linear_attn.evaluation.tasks.base import (
    Sample,
    Task,
    available_tasks,
    get_task,
    is_exact,
    parse_task,
    register_task,
    sample_rng,
    score,
    true_answer,
)
from hf_linear_attn.evaluation.tasks.haystack import Haystack, Noise, Text

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Haystack",
    "Noise",
    "Sample",
    "Task",
    "Text",
    "available_tasks",
    "get_task",
    "is_exact",
    "parse_task",
    "register_task",
    "sample_rng",
    "score",
    "true_answer",
]
