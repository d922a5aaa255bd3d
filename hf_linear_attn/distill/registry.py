"""The stages that there are; each registers itself when its file in ``stages/`` is imported."""

from typing import Any, TypeVar

from hf_linear_attn.errors import ArgumentError

StageT = TypeVar("StageT", bound=type[Any])

_STAGES: dict[str, type[Any]] = {}


def register_stage(stage: StageT) -> StageT:
    """Make a stage known by its ``name``, a decorator of its class.

    Raises:
        ArgumentError: If another file has a stage of that name.
    """
    other = _STAGES.get(stage.name)
    if other is not None and other.__module__ != stage.__module__:
        raise ArgumentError("stage", "have a name of its own", stage.name, f"Choose another than {other.__module__}'s.")
    _STAGES[stage.name] = stage
    return stage


def available_stages() -> tuple[str, ...]:
    """Return the names of the stages, in the order they run."""
    return tuple(sorted(_STAGES, key=lambda name: (_STAGES[name].place, name)))


def stage_class(name: str) -> Any:
    """Return the :class:`Stage` of a name.

    Raises:
        ArgumentError: If there is none.
    """
    if name not in _STAGES:
        raise ArgumentError("stages", "be known", name, "Use some of those", available=_STAGES)
    return _STAGES[name]
