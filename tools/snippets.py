"""Read the code blocks of a page, run its Python in order, and write what it prints below each block.

    python -m tools.snippets README.md docs/tutorial.md     # renew the outputs of these pages

A block that cannot run says why in a comment above it: `<!-- not run: needs eight GPUs -->`. Output stands in a `text`
block right below the Python that printed it.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*?) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
REASON = re.compile(r"not run: (\w.*)")


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Args:
        page: Where it stands.
        line: Its first line of code there.
        language: What its fence says.
        code: What it holds.
        comment: The comment on the line above the fence, if any.
        span: Where its code begins and ends in the page's text.
    """

    page: Path
    line: int
    language: str
    code: str
    comment: str
    span: tuple[int, int]

    @property
    def reason(self) -> str | None:
        """Why it is not run; None where it is."""
        found = REASON.fullmatch(self.comment)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return a page's code blocks in order."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["comment"] or "",
            found.span("code"),
        )
        for found in FENCE.finditer(text)
    ]


def output_of(page: list[Block], number: int) -> Block | None:
    """Return the block that shows what a page's block prints, the next one if its language is `text`."""
    after = page[number + 1] if number + 1 < len(page) else None
    if after is None or after.language != "text":
        return None
    between = page[number].page.read_text()[page[number].span[1] : after.span[0]]
    return after if between.replace("```text", "").replace("```", "").strip() == "" else None


def run(page: list[Block], change: Callable[[str], str] = str) -> dict[int, str]:
    """Run a page's Python blocks in order, in one namespace.

    Args:
        page: Its blocks.
        change: What is done to the code first, as to make it shorter.

    Returns:
        What each block printed, by its number.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = {}
    for number, block in enumerate(page):
        if block.language == "python" and block.reason is None:
            # Errors point at the page's own lines.
            code = compile("\n" * (block.line - 1) + change(block.code), str(block.page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            printed[number] = out.getvalue()
    return printed


def renew(path: Path) -> None:
    """Run a page and write its outputs into it."""
    page = blocks(path)
    shown = {number: output for number in range(len(page)) if (output := output_of(page, number))}
    text = path.read_text()
    # What stands below the last output may name models of the reader's.
    for number, printed in reversed(run(page[: max(shown, default=-1) + 1]).items()):
        if number in shown:
            begin, end = shown[number].span
            text = f"{text[:begin]}{printed.rstrip()}\n{text[end:]}"
    path.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        renew(Path(name))
