"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table.

    Example:
        >>> markdown_table(["", "nats"], [["student", "1.25"]])
        ['| | nats |', '| --- | --- |', '| student | 1.25 |']
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines]
