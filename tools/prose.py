"""Measure the prose of README and guides: how long its sentences are, and whether private words are explained.

    python -m tools.prose            # a line for each page; status 1 where a page breaks a rule

Two rules. A page's sentences have at most 17 words on average. A word of the glossary is a link to its entry where a
page uses it first.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs/glossary.md"
MOST_WORDS = 17
EXEMPT = {
    "docs/results": "measured tables and the notebook beside them",
    "docs/reference": "made from docstrings",
    "docs/kernels.md": "for those who write kernels, not a guide",
    "docs/feature-maps.md": "made by a command from the registry",
}
"""Pages that the rules do not hold for, and why."""

FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]*)\)(?:\{[^}]*\})?")
IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)(?:\{[^}]*\})?")
CODE = re.compile(r"`+[^`]+`+")


@dataclass(frozen=True)
class Term:
    """A word of the glossary.

    Args:
        name: Its heading.
        anchor: Where a link leads.
        forms: The ways in which it is written.
    """

    name: str
    anchor: str
    forms: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """What finds it in a text."""
        words = "|".join(re.escape(form).replace(r"\ ", r"\s+") for form in sorted(self.forms, key=len, reverse=True))
        return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)


def terms() -> list[Term]:
    """Read the glossary: a heading is a word, and a line *Also: ...* below it lists its other forms."""
    found = []
    for entry in re.split(r"^## ", GLOSSARY.read_text(), flags=re.MULTILINE)[1:]:
        name = entry.splitlines()[0].strip()
        also = re.search(r"^\*Also: (.*?)\.\*$", entry, re.MULTILINE | re.DOTALL)
        forms = [name, *(also[1].replace("\n", " ").split(", ") if also else [])]
        found.append(Term(name, name.lower().replace(" ", "-"), tuple(forms)))
    return found


def pages() -> list[Path]:
    """Return the pages that the rules hold for."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if not any(str(page.relative_to(ROOT)).startswith(name) for name in EXEMPT)]


def paragraphs(text: str, *, tables: bool = False) -> list[str]:
    """Return a page's prose: without code, headings, pictures, comments and, unless asked for, tables."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = IMAGE.sub(" ", COMMENT.sub("\n", FENCE.sub("\n\n", text)))
    found: list[list[str]] = [[]]
    in_list = False
    for line in text.splitlines():
        bare = line.strip()
        if re.match(r"(?:[*-]|\d+\.) ", bare):
            found.append([re.sub(r"^(?:[*-]|\d+\.) (?:\[[ x]\] )?", "", bare)])
            in_list = True
        elif not bare or bare.startswith(("#", "<", "=== ", "!!! ")) or (bare.startswith("|") and not tables):
            found.append([])
        elif line.startswith("    ") and not in_list:
            found.append([])  # an indented formula
        else:
            found[-1].append(bare)
            in_list = in_list and line.startswith(" ")
    return [" ".join(lines) for lines in found if lines]


def sentences(text: str) -> list[str]:
    """Split a page's prose into sentences; a word in code font, or a link, counts as it is read."""
    found = []
    for paragraph in paragraphs(text):
        plain = CODE.sub("code", LINK.sub(r"\1", paragraph)).replace("*", "")
        found += [part for part in re.split(r"(?<=[.!?])[\"')]*\s+", plain) if re.search(r"\w", part)]
    return found


def words(sentence: str) -> int:
    """Count the words of a sentence."""
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def average(text: str) -> float:
    """Return the words of a page's average sentence."""
    found = sentences(text)
    return sum(map(words, found)) / max(1, len(found))


def unexplained(text: str, among: list[Term]) -> list[str]:
    """Return the glossary's words that a page uses before it links to them."""
    body = "\n".join(paragraphs(CODE.sub(" ", text), tables=True))
    # What a link is called is a name, and its address is not read.
    free = LINK.sub(lambda found: " " * len(found[0]), body)
    found = []
    for term in among:
        link = re.search(rf"\[(?:[^\[\]]*)\]\([^)\s]*glossary\.md#{re.escape(term.anchor)}\)", body)
        longer = [other for other in among if other.name != term.name and term.pattern.search(other.name)]
        alone = free
        for other in longer:
            alone = other.pattern.sub(lambda found: " " * len(found[0]), alone)
        first = term.pattern.search(alone)
        if first and (link is None or first.start() < link.start()):
            around = body[max(0, first.start() - 30) : first.end() + 20].replace("\n", " ")
            found.append(f"{term.name}: ...{around}...")
    return found


def main() -> None:
    """Print a line for each page."""
    among, broken = terms(), False
    for page in pages():
        text = page.read_text()
        length, open_words = average(text), [] if page == GLOSSARY else unexplained(text, among)
        broken = broken or length > MOST_WORDS or bool(open_words)
        sys.stdout.write(f"{length:5.1f} words a sentence  {page.relative_to(ROOT)}\n")
        for line in open_words:
            sys.stdout.write(f"      before its first link: {line}\n")
    sys.exit(int(broken))


if __name__ == "__main__":
    main()
