"""Cases of which most wait for ``make slow-tests``."""

from collections.abc import Iterable
from typing import Any

import pytest


def spread(cases: Iterable[Any], step: int) -> list[Any]:
    """Return all cases, of which each ``step``-th is for `make test` and the others are slow.

    Of a product, all values are in `make test` if ``step`` shares no factor with their numbers and leaves enough.
    """
    return [case if i % step == 0 else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
