"""Pages are short to read, and explain their words; the rules are those of tools/prose.py."""

import pytest

from tools import prose

PAGES = prose.pages()
TERMS = prose.terms()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(prose.ROOT)))
def test_sentences_are_short(page):
    text = page.read_text()
    assert len(prose.sentences(text)) > 3
    assert prose.average(text) <= prose.MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(prose.ROOT)))
def test_words_of_the_glossary_are_linked_where_they_come_first(page):
    if page != prose.GLOSSARY:
        assert prose.unexplained(page.read_text(), TERMS) == []


def test_the_readme_is_short_and_the_glossary_whole():
    assert len((prose.ROOT / "README.md").read_text().splitlines()) < 120
    assert {"feature-map", "linear-attention", "state", "window-alone"} <= {term.anchor for term in TERMS}
    names = [term.name for term in TERMS]
    assert names == sorted(names, key=str.lower)


def test_what_is_counted():
    text = "# A head\n\nOne two [three](x.md). `a b c` five, six!\n\n* Seven eight\n  nine\n\n```\nnot this\n```\n"
    text += "| nor | that |\n"
    assert prose.sentences(text) == ["One two three.", "code five, six!", "Seven eight nine"]
    assert prose.average(text) == 3
    assert prose.average("A version 0.98 counts as one.\n") == 6


def test_what_is_unexplained():
    among = [prose.Term("State", "state", ("State", "states")), prose.Term("Patch", "patch", ("Patch", "patched"))]
    assert prose.unexplained("A [state](glossary.md#state), then states and `patch`.\n\n# Patch\n", among) == []
    assert [line[:6] for line in prose.unexplained("It is patched. A [state](glossary.md#state).", among)] == ["Patch:"]
    assert prose.unexplained("Its states, and a [state](../glossary.md#state).", among)
    # "A window alone" is a word of its own.
    both = [prose.Term("Window", "window", ("Window",)), prose.Term("Window alone", "window-alone", ("Window alone",))]
    assert prose.unexplained("A [window alone](glossary.md#window-alone). A window alone.", both) == []
    # What a link is called is a name.
    assert prose.unexplained("See [Patch](patching.md).", among) == []
