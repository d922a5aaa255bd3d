"""Errors raised by hf_linear_attn.

Each is also a built-in exception, so that callers who catch ``ValueError``, ``TypeError`` or ``RuntimeError`` keep
working. Messages have one form: the argument, the rule it broke, its value, where, and what to do about it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_VALUE = 500
"""Characters of a value that a message shows."""


class HFLinearAttnError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        argument: Name of the argument as the caller wrote it; a whole message where it stands alone.
        rule: What it must be, a phrase that follows "must".
        value: The value received; its ``repr`` is shown.
        remedy: One sentence that says how to fix it.
        where: The layer or model concerned, if any.
        available: Names that would have worked, if there is a list.

    Example:
        >>> raise ArgumentError("window", "be at least 1 token", 0, "Use None for no window.")
        Traceback (most recent call last):
        hf_linear_attn.errors.ArgumentError: `window` must be at least 1 token, got 0. Use None for no window.
    """

    def __init__(
        self,
        argument: str,
        rule: str | None = None,
        value: object = None,
        remedy: str = "",
        *,
        where: str | None = None,
        available: Iterable[str] | None = None,
    ) -> None:
        # Pickling, as between processes, makes an error anew from its message.
        whole = argument if rule is None else explain(argument, rule, value, remedy, where=where, available=available)
        super().__init__(whole)


class ArgumentError(HFLinearAttnError, ValueError):
    """An argument has a value that cannot be used."""


class ArgumentTypeError(HFLinearAttnError, TypeError):
    """An argument has the wrong type or dtype."""


class UnsupportedError(HFLinearAttnError, ValueError):
    """A model or a request needs something that linear attention cannot honour."""


class BackendError(HFLinearAttnError, RuntimeError):
    """A backend asked for by name cannot run here."""


class CheckpointError(HFLinearAttnError, RuntimeError):
    """A file or folder on disk is missing, damaged, or belongs to something else."""


class TrainingError(HFLinearAttnError, RuntimeError):
    """A training run cannot go on."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says anything."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Call the argument that an error of the block begins with what the user calls it, as ``path="student"`` does.

    Example:
        >>> with renamed(width="window"):
        ...     raise ArgumentError("width", "be at least 1", 0, "Raise it.")
        Traceback (most recent call last):
        hf_linear_attn.errors.ArgumentError: `window` must be at least 1, got 0. Raise it.
    """
    try:
        yield
    except HFLinearAttnError as error:
        named = str(error).split("`", 2)
        if named[0] or len(named) < 3 or named[1] not in names:
            raise
        raise type(error)(f"`{names[named[1]]}`{named[2]}") from error


def explain(
    argument: str,
    rule: str,
    value: object,
    remedy: str,
    *,
    where: str | None = None,
    available: Iterable[str] | None = None,
) -> str:
    """Compose an error message in the one form used everywhere; arguments are those of :class:`HFLinearAttnError`.

    Example:
        >>> explain("feature_map", "be a registered name", "elo", "Use one of those.", available=["relu", "elu"])
        "`feature_map` must be a registered name, got 'elo'. Use one of those; available: elu, relu."
    """
    place = f" ({where})" if where else ""
    message = f"`{argument}` must {rule}, got {_shown(value)}{place}. {remedy}"
    if available is not None:
        message = f"{message.rstrip('.')}; available: {', '.join(sorted(map(str, available))) or 'none'}."
    return message


def _shown(value: object) -> str:
    """Return a value's ``repr`` in a line, cut where it is long; its type where it has none, as huge values do."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except (RecursionError, ValueError):
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
