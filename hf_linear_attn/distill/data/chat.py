"""Conversations: the forms they are kept in, the text a tokenizer's template makes of them, and what is said in it.

The loss is on what the assistant says. A template may mark it with ``{% generation %}``. Where it does not, it is found
by rendering the conversation up to each answer: what comes after that is the answer, if the text up to there is the
beginning of the whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hf_linear_attn.errors import ArgumentError, first_line

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Who speaks, by the names that datasets use: OpenAI's (also TRL's) and ShareGPT's."""

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

TODAY = "26 Jul 2024"
"""The date for templates that tell it: a row is the same whenever it is read. (It is that of Llama 3's templates.)"""

Message = dict[str, Any]
Span = tuple[int, int]


class Rendered(NamedTuple):
    """A text to learn from."""

    text: str
    answers: Sequence[Span] | None = None
    """The characters that are learned; None for all."""
    bos: bool = True
    """Whether BOS goes before it."""
    eos: bool = True
    """Whether EOS ends it."""


def to_messages(row: object, where: str) -> list[Message]:
    """Return a conversation as messages with ``role`` and ``content``.

    It is a list of ``{"role", "content"}`` (OpenAI) or ``{"from", "value"}`` (ShareGPT). Here and below, ``where`` is
    what errors call the row.
    """
    if not isinstance(row, Sequence) or not row or not all(isinstance(turn, Mapping) for turn in row):
        remedy = 'A message is {"role": ..., "content": ...} or {"from": ..., "value": ...}.'
        raise ArgumentError("dataset", "hold conversations as lists of messages", row, remedy, where=where)
    return [_message(without_none(turn), where) for turn in row]


def _message(turn: Mapping[str, Any], where: str) -> Message:
    speaker = turn.get("role", turn.get("from"))
    if speaker not in ROLES:
        raise ArgumentError("dataset", "name who speaks", speaker, "Rename the roles", where=where, available=ROLES)
    said = turn.get("content", turn.get("value"))
    rest = {name: value for name, value in turn.items() if name not in ("role", "from", "content", "value")}
    if speaker == "function_call":
        return {"role": "assistant", "tool_calls": [_tool_call(said, where)]} | rest
    message = {"role": ROLES[speaker], "content": said} | rest
    if message["role"] == "assistant" and not has_text(said) and not rest.get("tool_calls"):
        remedy = "There is nothing to learn from an empty one: remove the row, or fill it in."
        raise ArgumentError("dataset", "have something in every assistant turn", said, remedy, where=where)
    return message


def _tool_call(said: object, where: str) -> dict[str, Any]:
    try:
        call = json.loads(str(said))
        return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    except (ValueError, KeyError, TypeError) as error:
        remedy = 'Write {"name": ..., "arguments": {...}}.'
        raise ArgumentError("dataset", "hold function calls as JSON", said, remedy, where=where) from error


def has_text(content: object) -> bool:
    """Tell whether a message's content, a text or a list of parts, says anything."""
    if isinstance(content, str):
        return bool(content) and not content.isspace()
    return isinstance(content, Sequence) and bool(content)


def without_none(value: Any) -> Any:
    """Return a value without the keys that Arrow has added to make all rows alike."""
    if isinstance(value, Mapping):
        return {name: without_none(item) for name, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


class ChatTemplate:
    """What a tokenizer's template makes of conversations; ``bos`` is the token that it puts before a text, or none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, bos: Sequence[int]) -> None:
        if not tokenizer.chat_template:
            rule = "be a file with a template, since the tokenizer has none"
            remedy = "Name one, use the instruct checkpoint, or write the data as `prompt` and `completion`."
            raise ArgumentError("chat_template", rule, None, remedy)
        self.template: str = tokenizer.get_chat_template()
        self.tokens = dict(tokenizer.special_tokens_map)
        self.marked = bool(MARKED.search(self.template))
        self.bos = str(tokenizer.bos_token) if bos else ""

    def render(self, messages: Sequence[Message], tools: Any, where: str, *, first: int = 0) -> Rendered:
        """Return the text of a conversation, and what the assistant says in it from message ``first`` on."""
        whole, answers = self._text(messages, tools, where, marked=self.marked)
        if not self.marked:
            answers = self._answers(messages, tools, where, whole)
        spoken = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if first:
            if len(answers) != len(spoken):
                raise self._unclear(where, "marks another number of answers than there are")
            answers = [span for n, span in zip(spoken, answers, strict=True) if n >= first]
        if not answers:
            raise ArgumentError(
                "dataset", "have an assistant turn in every row", len(messages), "Remove the row.", where=where
            )
        begun = bool(self.bos) and whole.startswith(self.bos)
        cut = len(self.bos) * begun
        spans = [(max(0, start - cut), end - cut) for start, end in answers]
        return Rendered(whole[cut:], spans, bos=begun, eos=False)

    def _text(
        self, messages: Sequence[Message], tools: Any, where: str, *, marked: bool = False, ask: bool = False
    ) -> tuple[str, list[Span]]:
        options: dict[str, Any] = self.tokens | {"date_string": TODAY}
        rendered: Any
        try:
            rendered = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=ask,
                **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            rule, remedy = "take the dataset's conversations", "Change the rows, or name another template."
            raise ArgumentError("chat_template", rule, first_line(error), remedy, where=where) from error
        (text,), marks = rendered
        return text, list(marks[0]) if marked else []

    def _answers(self, messages: Sequence[Message], tools: Any, where: str, whole: str) -> list[Span]:
        """Return where each answer stands in the text, by what stands before it and what it ends with."""
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._text(messages[:number], tools, where, ask=True)
            closed, _ = self._text(messages[: number + 1], tools, where)
            if not whole.startswith(before) or not closed.startswith(before):
                raise self._unclear(where, "writes what stands before an answer otherwise once it is given")
            if whole.startswith(closed):
                found.append((len(before), len(closed)))
                continue
            # Some show the last answer otherwise than earlier ones, such as with its reasoning; its text and what
            # closes it they leave alone.
            said = str(message.get("content") or "").strip()
            ending = closed[closed.rfind(said) :] if said else ""
            start = whole.find(ending, len(before)) if ending else -1
            if start < 0:
                raise self._unclear(where, "writes an answer otherwise once another one follows")
            found.append((len(before), start + len(ending)))
        return found

    def _unclear(self, where: str, what: str) -> ArgumentError:
        rule = "show which text is the assistant's"
        remedy = "Put `{% generation %}` and `{% endgeneration %}` around answers in it and name that file."
        return ArgumentError("chat_template", rule, f"a template that {what}", remedy, where=where)


def read_tools(value: object, where: str) -> list[Any] | None:
    """Return the tools of a row, a list that may be kept as JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ArgumentError("dataset", "hold tools as JSON", value, "Mend the row.", where=where) from error
    if not value:
        return None
    if not isinstance(value, list):
        raise ArgumentError("dataset", "hold tools as a list", value, "Mend the row.", where=where)
    return without_none(value)  # type: ignore[no-any-return]
