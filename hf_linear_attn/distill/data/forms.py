"""The forms of datasets, recognised by their columns: what is read of a row, and which of it is learned."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hf_linear_attn.distill.data.chat import ChatTemplate, Message, Rendered, has_text, read_tools, to_messages
from hf_linear_attn.errors import ArgumentError

Row = Mapping[str, Any]
Template = Callable[[], ChatTemplate]
"""Called where rows are conversations: only those need one."""


class Form(NamedTuple):
    """A form of rows.

    Attributes:
        needed: Columns by which it is known.
        read: Returns what a row says, or None where it is empty; errors call the row as the last argument says.
        optional: Columns that are read where they are there.
    """

    needed: tuple[str, ...]
    read: Callable[[Row, Template, str], Rendered | None]
    optional: tuple[str, ...] = ()


def read_text(row: Row, template: Template, where: str) -> Rendered | None:
    """Read a text, all of which is learned."""
    text = row["text"]
    if text is not None and not isinstance(text, str):
        remedy = "Name the column that holds them, as in `text=body`."
        raise ArgumentError("columns", "name texts", text, remedy, where=where)
    return Rendered(text) if text and has_text(text) else None


def read_conversation(row: Row, template: Template, where: str) -> Rendered | None:
    """Read a conversation as OpenAI and TRL keep them, or as ShareGPT and LLaMA-Factory do."""
    turns = row["messages"] if "messages" in row else row["conversations"]
    return _render(to_messages(turns, where), row, template, where)


def read_completion(row: Row, template: Template, where: str) -> Rendered | None:
    """Read a prompt and how it goes on, both texts or both messages; the completion is learned."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(completion, list):
        before = to_messages(prompt, where)
        return _render([*before, *to_messages(completion, where)], row, template, where, first=len(before))
    if not isinstance(prompt or "", str) or not has_text(completion):
        remedy = "Write both as texts or both as messages, the completion not empty."
        raise ArgumentError("dataset", "have a prompt and a completion", (prompt, completion), remedy, where=where)
    text = (prompt or "") + completion
    return Rendered(text, [(len(prompt or ""), len(text))])


def read_instruction(row: Row, template: Template, where: str) -> Rendered | None:
    """Read an instruction, its input and the answer, as Alpaca and LLaMA-Factory keep them."""
    asked = "\n".join(part for part in (row["instruction"], row.get("input") or "") if has_text(part))
    turns = [*(row.get("history") or []), (asked, row["output"])]
    messages = [
        message
        for question, answer in turns
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
    return _render(to_messages(messages, where), row, template, where)


def _render(messages: Sequence[Message], row: Row, template: Template, where: str, *, first: int = 0) -> Rendered:
    """Return the text of a conversation, of which is learned what the assistant says from message ``first`` on."""
    system = row.get("system")
    if has_text(system) and messages[0]["role"] != "system":
        messages, first = [{"role": "system", "content": system}, *messages], first + bool(first)
    return template().render(messages, read_tools(row.get("tools"), where), where, first=first)


FORMS = (
    Form(("messages",), read_conversation, ("system", "tools")),
    Form(("conversations",), read_conversation, ("system", "tools")),
    Form(("prompt", "completion"), read_completion, ("tools",)),
    Form(("instruction", "output"), read_instruction, ("input", "system", "history", "tools")),
    Form(("text",), read_text),
)
"""The first whose columns are there is taken: where a text stands beside a conversation, it is made of it."""


def form_of(columns: Collection[str], named: Collection[str]) -> Form:
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
