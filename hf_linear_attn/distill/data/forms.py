"""The forms of datasets, recognised by their columns: what is read of a row, and which of it is learned."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from hf_linear_attn.distill.data.chat import ChatTemplate, Message, Rendered, has_text, read_tools, to_messages
from hf_linear_attn.errors import ArgumentError

Row = Mapping[str, Any]


class Form(ABC):
    """A form of rows; ``template`` is only called where they are conversations."""

    needed: ClassVar[tuple[str, ...]]
    """Columns by which the form is known."""
    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(self, template: Callable[[], ChatTemplate]) -> None:
        self.template = template

    @abstractmethod
    def read(self, row: Row, where: str) -> Rendered | None:
        """Return what a row says, or None where it is empty; errors call it ``where``."""

    def chat(self, messages: Sequence[Message], row: Row, where: str, *, first: int = 0) -> Rendered:
        """Return the text of a conversation."""
        system = row.get("system")
        if has_text(system) and messages[0]["role"] != "system":
            messages, first = [{"role": "system", "content": system}, *messages], first + bool(first)
        return self.template().render(messages, read_tools(row.get("tools"), where), where, first=first)


class Text(Form):
    """Texts, all of which is learned."""

    needed = ("text",)

    @override
    def read(self, row: Row, where: str) -> Rendered | None:
        text = row["text"]
        if text is not None and not isinstance(text, str):
            remedy = "Name the column that holds them, as in `text=body`."
            raise ArgumentError("columns", "name texts", text, remedy, where=where)
        return Rendered(text) if text and has_text(text) else None


class Messages(Form):
    """Conversations as OpenAI and TRL keep them."""

    needed = ("messages",)
    optional = ("system", "tools")

    @override
    def read(self, row: Row, where: str) -> Rendered | None:
        return self.chat(to_messages(row[self.needed[0]], where), row, where)


class Conversations(Messages):
    """Conversations as ShareGPT and LLaMA-Factory keep them."""

    needed = ("conversations",)


class PromptCompletion(Form):
    """A prompt and how it goes on, both texts or both messages; the completion is learned."""

    needed = ("prompt", "completion")
    optional = ("tools",)

    @override
    def read(self, row: Row, where: str) -> Rendered | None:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(completion, list):
            before = to_messages(prompt, where)
            return self.chat([*before, *to_messages(completion, where)], row, where, first=len(before))
        if not isinstance(prompt or "", str) or not has_text(completion):
            remedy = "Write both as texts or both as messages, the completion not empty."
            raise ArgumentError("dataset", "have a prompt and a completion", (prompt, completion), remedy, where=where)
        text = (prompt or "") + completion
        return Rendered(text, [(len(prompt or ""), len(text))])


class Instruction(Form):
    """An instruction, its input and the answer, as Alpaca and LLaMA-Factory keep them."""

    needed = ("instruction", "output")
    optional = ("input", "system", "history", "tools")

    @override
    def read(self, row: Row, where: str) -> Rendered | None:
        asked = "\n".join(part for part in (row["instruction"], row.get("input") or "") if has_text(part))
        turns = [*(row.get("history") or []), (asked, row["output"])]
        messages = [
            message
            for question, answer in turns
            for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        ]
        return self.chat(to_messages(messages, where), row, where)


FORMS: tuple[type[Form], ...] = (Messages, Conversations, PromptCompletion, Instruction, Text)
"""The first whose columns are there is taken: where a text stands beside a conversation, it is made of it."""


def form_of(columns: Collection[str], named: Collection[str] = ()) -> type[Form]:
    """Return the form of a dataset with those columns; those that the settings name decide where several fit."""
    fitting = [form for form in FORMS if set(form.needed) <= set(columns)]
    if not fitting:
        raise ArgumentError(
            "columns",
            "name what is learned, since the dataset's own names do not tell",
            sorted(set(columns) - set(named)),
            "Write `text=` and the column that holds the text, or so with the columns of another form",
            available=[" + ".join(form.needed) for form in FORMS],
        )
    return next((form for form in fitting if set(form.needed) & set(named)), fitting[0])
