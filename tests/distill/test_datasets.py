"""Datasets as people have them: forms, files, and several at once."""

import bz2
import csv
import gzip
import json
import lzma
import math

import pytest
import zstandard
from datasets import Dataset, DatasetDict

from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.data import MixedBlocks, load_data
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.loading import load_tokenizer
from tests.distill.tiny import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}"
)
# Like Qwen3's: the last answer has room for reasoning, earlier ones do not.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like DeepSeek-R1's: who is asked begins otherwise than what is then kept.
PROMPTING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)

ASKED = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
TWICE = [*ASKED, {"role": "user", "content": "Really?"}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture
def chatty():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings_for(*datasets, **changes):
    return DistillationSettings(
        **{"dataset": list(map(str, datasets)), "block_tokens": 8, "rows": 1, "recall_share": 0.0, "pack": False}
        | changes
    )


def texts(tokenizer, settings, count, length=256):
    """Return what is read, and what of it is learned, of the first training sequences."""
    data = load_data(settings, tokenizer)[0]
    found = []
    for number in range(count):
        row = data.text_row(number, length)
        learned = [token for token, weight in zip(row.input_ids, row.weights, strict=True) if weight]
        found.append((tokenizer.decode(row.input_ids), tokenizer.decode(learned)))
    return found


ALPACA = {"instruction": "Why?", "input": "In short.", "output": "Because."}
SHAREGPT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
SAID = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "whole", "learned"),
    [
        ({"text": "Why? Because."}, "<bos>Why? Because.<eos>", "Why? Because.<eos>"),
        ({"messages": ASKED}, SAID, "Because.<|im_end|>\n"),
        ({"conversations": SHAREGPT}, SAID, "Because.<|im_end|>\n"),
        ({"conversations": ASKED, "text": "unread"}, SAID, "Because.<|im_end|>\n"),
        ({"conversations": SHAREGPT, "system": "Be short."}, "<|im_start|>system\nBe short.<|im_end|>\n" + SAID,
         "Because.<|im_end|>\n"),
        ({"prompt": "Why?", "completion": " Because."}, "<bos>Why? Because.<eos>", " Because.<eos>"),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, SAID, "Because.<|im_end|>\n"),
        ({"prompt": TWICE[:3], "completion": TWICE[3:]},
         SAID + "<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n", "Yes.<|im_end|>\n"),
        (ALPACA, SAID.replace("Why?", "Why?\nIn short."), "Because.<|im_end|>\n"),
        (ALPACA | {"input": "", "history": [["Who?", "I."]], "system": "Be short."},
         "<|im_start|>system\nBe short.<|im_end|>\n" + SAID.replace("Why", "Who").replace("Because", "I") + SAID,
         "I.<|im_end|>\nBecause.<|im_end|>\n"),
    ],
)  # fmt: skip
def test_forms_are_recognised_and_answers_are_learned(tmp_path, chatty, row, whole, learned, streaming):
    write(tmp_path / "a.jsonl", [row] * 40)
    settings = settings_for(tmp_path / "a.jsonl", streaming=streaming)
    assert texts(chatty, settings, 1) == [(whole, learned)]
    assert texts(chatty, settings.with_changes(loss_on="all"), 1)[0][0] == whole
    all_learned = texts(chatty, settings.with_changes(loss_on="all"), 1)[0][1]
    assert all_learned == whole.removeprefix("<bos>") if whole.startswith("<bos>") else all_learned == whole[1:]


@pytest.mark.parametrize(
    ("template", "rows", "whole", "learned"),
    [
        (MARKED, TWICE, "<bos>U: Why?\nA: Because.<eos>U: Really?\nA: Yes.<eos>", "Because.<eos>Yes.<eos>"),
        (REASONING, TWICE, None, "Because.<|im_end|>\n<think>\n\n</think>\n\nYes.<|im_end|>\n"),
        (CHATML, TWICE, None, "Because.<|im_end|>\nYes.<|im_end|>\n"),
        # An answer that comes twice, and one that stands in a question before it.
        (CHATML, [*ASKED[:1], ASKED[1], {"role": "user", "content": "Because."}, ASKED[1]], None,
         "Because.<|im_end|>\n" * 2),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ASKED, None, "assistant: Because.\n"),
    ],
)  # fmt: skip
def test_what_the_assistant_says_is_found_in_a_templates_text(tmp_path, template, rows, whole, learned):
    (tmp_path / "mine.jinja").write_text(template)
    write(tmp_path / "a.jsonl", [{"messages": rows}] * 40)
    tokenizer = byte_tokenizer()
    (found,) = texts(tokenizer, settings_for(tmp_path / "a.jsonl", chat_template=str(tmp_path / "mine.jinja")), 1)
    assert found[1] == learned
    assert found[0] == (whole or tokenizer.apply_chat_template(rows, tokenize=False))
    assert tokenizer.chat_template == template


def test_our_marks_are_those_of_transformers(tmp_path, tokenizer):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = MARKED
    write(tmp_path / "a.jsonl", [{"messages": TWICE}] * 40)
    row = load_data(settings_for(tmp_path / "a.jsonl"), tokenizer)[0].text_row(0, 256)
    theirs = tokenizer.apply_chat_template(TWICE, return_dict=True, return_assistant_tokens_mask=True)
    assert row.input_ids == theirs["input_ids"]
    assert row.weights == list(map(float, theirs["assistant_masks"]))


def test_tools_and_what_arrow_adds_are_as_the_template_expects(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% if m.tool_calls is defined %}{{ m.tool_calls[0].function.arguments.city }}{% else %}{{ m.content }}"
        "{% endif %}|{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    turns = [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Kiel"}})},
        {"from": "observation", "value": "yes"},
        {"from": "gpt", "value": "It rains."},
    ]
    write(tmp_path / "a.jsonl", [{"conversations": turns, "tools": tools}] * 40)
    whole = "weather;user:Rain?|assistant:Kiel|tool:yes|assistant:It rains.|"
    assert texts(tokenizer, settings_for(tmp_path / "a.jsonl"), 1) == [(whole, "Kiel|It rains.|")]


def test_long_conversations_are_cut_and_pieces_without_an_answer_left_out(tmp_path, chatty):
    long = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 60}]
    write(tmp_path / "a.jsonl", [{"messages": long}] * 40)
    data = load_data(settings_for(tmp_path / "a.jsonl"), chatty)[0]
    rows = [data.text_row(number, 64) for number in range(len(data.blocks.places(64)))]
    assert all(len(row.input_ids) == 64 and any(row.weights) for row in rows)
    assert len(rows) == 2 * 38


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_many_kinds_are_read_from_one_folder(tmp_path, chatty, streaming):
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    lines = "".join(json.dumps({"text": f"zst {n} " * 4}) + "\n" for n in range(20)).encode()
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"gz line one\n\ngz line two\n" * 3))
    (folder / "more" / "c.md").write_text("markdown " * 4)
    (folder / "more" / "d.txt.xz").write_bytes(lzma.compress(b"xz " * 9))
    (folder / "more" / "e.txt.bz2").write_bytes(bz2.compress(b"bz2 " * 9))
    for name, delimiter in (("f.csv", ","), ("g.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([("prompt", "completion"), (name, ', "said"\n it')] * 1)
    Dataset.from_dict({"text": ["parquet " * 4]}).to_parquet(folder / "h.parquet")
    write(folder / "chat.jsonl", [{"messages": ASKED}])
    (folder / "i.json").write_text(json.dumps([{"messages": TWICE}], indent=1))
    (folder / "README.md").write_text("About the data. " * 4)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "j.txt").write_text("hidden " * 9)
    (folder / "picture.png").write_bytes(b"png")
    (folder / "empty.txt").write_text("")
    settings = settings_for(folder, streaming=streaming)
    parts = load_data(settings, chatty)
    found = " ".join(chatty.decode(data.text_row(number, 256).input_ids) for data in parts for number in range(35))
    for word in ("zst 3", "gz line two", "markdown", "xz xz", "bz2", 'f.csv, "said"\n it', 'g.tsv, "said"', "parquet",
                 "Really?", "Because."):  # fmt: skip
        assert word in found, word
    assert "About" not in found
    assert "hidden" not in found


def test_saved_datasets_are_read(tmp_path, chatty):
    Dataset.from_dict({"text": ["arrow " * 9] * 30}).save_to_disk(tmp_path / "one")
    DatasetDict({"mine": Dataset.from_dict({"text": ["dict " * 9] * 30})}).save_to_disk(tmp_path / "two")
    settings = settings_for(tmp_path / "one", tmp_path / "two", dataset_split=["train", "mine"])
    for streaming in (False, True):
        found = texts(chatty, settings.with_changes(streaming=streaming), 2)
        assert [whole.split()[0] for whole, _ in found] == ["<bos>dict", "<bos>arrow"]


def test_columns_are_named_where_they_do_not_tell(tmp_path, chatty):
    write(tmp_path / "a.jsonl", [{"question": "2 + 2?", "answer": " 4.", "text": "unread"}] * 40)
    settings = settings_for(tmp_path / "a.jsonl", columns=["prompt=question", "completion=answer"])
    assert texts(chatty, settings, 1) == [("<bos>2 + 2? 4.<eos>", " 4.<eos>")]
    assert texts(chatty, settings.with_changes(columns="text=question"), 1)[0][0] == "<bos>2 + 2?<eos>"
    for columns, message in (
        ("text=body", r"`columns` must name columns of a dataset .*'text=body'.*available: text\."),
        ("body", r"`columns` must say what a column stands for, got 'body'.*`text=body`"),
        ("label=text", r"`columns` must say what a column stands for, got 'label=text'.*available: completion, "),
    ):
        with pytest.raises(ArgumentError, match=message):
            load_data(settings.with_changes(columns=columns), chatty)


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_are_mixed_by_weight(tmp_path, chatty, streaming):
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} " * 20}] * 40)
    settings = settings_for(
        *(tmp_path / f"{name}.jsonl" for name in "abc"), dataset_weights=[2, 1, 5], streaming=streaming
    )
    for data in load_data(settings, chatty):
        read = [chatty.decode(data.text_row(number, 32).input_ids)[5] for number in range(80)]
        assert [read.count(name) for name in "abc"] == [20, 10, 50]
        assert {"a", "b", "c"} == set(read[:8])
        assert [chatty.decode(data.text_row(number, 32).input_ids)[5] for number in (7, 3)] == [read[7], read[3]]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, 0.1, 0.2], [1, 1000], [3.0]])
def test_shares_hold_in_any_run_and_no_block_is_left_out(weights):
    mixed = MixedBlocks([None] * len(weights), weights)
    places = [mixed.place(number) for number in range(2000)]
    for part, weight in enumerate(weights):
        own = [number for which, number in places if which == part]
        assert own == list(range(len(own)))
        for first in (0, 1000):
            count = sum(which == part for which, _ in places[first : first + 1000])
            assert abs(count - 1000 * weight / sum(weights)) <= len(weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_weights": [1.0]}, r"`dataset_weights` must be one positive number for each of 2 datasets, got"),
        ({"dataset_weights": [1.0, -1.0]}, "`dataset_weights` must be one positive .* They need not add up to 1"),
        ({"dataset_weights": [0.0, 0.0]}, "`dataset_weights` must be one positive number"),
        ({"dataset_split": ["a", "b", "c"]}, "`dataset_split` must be one for all datasets, or one for each of the 2"),
        ({"loss_on": "questions"}, "`loss_on` must be a known choice"),
    ],
)  # fmt: skip
def test_bad_mixtures_are_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        settings_for("a", "b", **changes)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": ASKED[:1]}, r"`dataset` must have an assistant turn in every row, .*\(row \d+ of .*a.jsonl\)"),
        ({"messages": [ASKED[0], {"role": "assistant", "content": " "}]},
         r"`dataset` must have something in every assistant turn, got ' ' \(row \d+ of .*remove the row"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "`dataset` must name who speaks, got 'narrator'.*human"),
        ({"messages": "Why?"}, "`dataset` must hold conversations as lists of messages, got 'Why[?]'"),
        ({"messages": []}, "`dataset` must hold conversations as lists of messages"),
        ({"prompt": "Why?", "completion": ""}, "`dataset` must have a prompt and a completion"),
        (ALPACA | {"output": ""}, "`dataset` must have something in every assistant turn"),
        ({"conversations": SHAREGPT, "tools": "{"}, "`dataset` must hold tools as JSON, got '{'"),
        ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "f()"}]},
         "`dataset` must hold function calls as JSON"),
        ({"question": "Why?", "answer": "Because."},
         r"`columns` must name what is learned, .* got \['answer', 'question'\].*available: .*\+ completion, text"),
        ({"prompt": "Why?", "chosen": "x", "rejected": "y"}, "`columns` must name what is learned"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, chatty, row, message, streaming):
    write(tmp_path / "a.jsonl", [row] * 30)
    with pytest.raises(ArgumentError, match=message):
        load_data(settings_for(tmp_path / "a.jsonl", streaming=streaming), chatty)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"`chat_template` must be a file with a template, .* use the instruct checkpoint"),
        (PROMPTING, r"`chat_template` must show which text is the assistant's.*\(row \d+ of.*% generation %"),
        ("{{ raise_exception('Roles alternate') }}", "take the dataset's conversations, got 'Roles alternate'"),
        ("{{ messages[0].content.nothing() }}", "`chat_template` must take the dataset's conversations"),
        ("{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}", "show which text is the assistant's"),
        ("{% generation %}", "`chat_template` must take the dataset's conversations"),
    ],
)  # fmt: skip
def test_templates_that_do_not_serve_are_named(tmp_path, template, message):
    write(tmp_path / "a.jsonl", [{"messages": TWICE}] * 30)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ArgumentError, match=message):
        load_data(settings_for(tmp_path / "a.jsonl"), tokenizer)


def test_a_missing_template_file_is_named(tmp_path, tokenizer):
    settings = settings_for(tmp_path, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ArgumentError, match="`chat_template` must be a readable UTF-8 text"):
        load_data(settings, tokenizer)


LINES = "".join(json.dumps({"text": f"{n} " * 50}) + "\n" for n in range(2000)).encode()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("damage", ["cut", "changed", "never compressed", "cut between lines"])
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".txt.zst"])
def test_damaged_compressed_files_are_named(tmp_path, chatty, suffix, damage, streaming):
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    compress = gzip.compress if suffix.endswith("gz") else zstd.compress
    whole = compress(LINES)
    content = {
        "cut": whole[: len(whole) // 2],
        "changed": whole[:200] + bytes(255 - byte for byte in whole[200:260]) + whole[260:],
        "never compressed": LINES,
        "cut between lines": whole[:-2],
    }[damage]
    (tmp_path / "good.txt").write_text("whole " * 20)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=rf"`dataset` must consist of files that are whole, got '{path}'. Copy or"):
        load_data(settings_for(tmp_path, streaming=streaming), chatty)


QUOTES = "Put texts that hold commas or line breaks in quotes: .* in line"
DAMAGED = {
    "b.txt": (b"\xff\xfea", "Correct it, or copy it again: 'utf-8'"),
    "b.jsonl": (b'{"text": "one"}\n{"text": "tw\n', "Correct it, or copy it again: JSON"),
    "b.csv": (b"text\none\ntwo, or, three\n", f"{QUOTES} 3"),
    # What pandas would call names of rows: the text would be `three` alone.
    "b.tsv": (b"text\none\ttwo\tthree\n", f"{QUOTES} 2"),
    "b.parquet": (b"", "Correct it"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(tmp_path, tokenizer, name):
    (tmp_path / "a.jsonl").write_text('{"text": "whole"}\n')
    content, message = DAMAGED[name]
    if not content:
        Dataset.from_list([{"text": "one"}]).to_parquet(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        content = content[:8] + bytes(20) + content[28:]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=rf"`dataset` must consist of files .* got '{tmp_path / name}'\. {message}"):
        load_data(settings_for(tmp_path), tokenizer)


@pytest.mark.parametrize("name", ["blank.jsonl", "blank.csv", "header.csv"])
def test_files_without_a_row_are_left_out(tmp_path, tokenizer, name):
    (tmp_path / name).write_text("text\n\n" if name == "header.csv" else "\n \n")
    with pytest.raises(ArgumentError, match=rf"`dataset` must hold text, got '{tmp_path / name}'\. It is empty"):
        load_data(settings_for(tmp_path / name), tokenizer)
    (tmp_path / "good.txt").write_text("whole " * 20)
    assert load_data(settings_for(tmp_path), tokenizer)


def test_zst_files_of_several_frames_are_whole(tmp_path, chatty):
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    frames = [zstandard.ZstdCompressor(write_checksum=flag).compress(LINES[:40000]) for flag in (True, False)]
    zeros = zstandard.compress(b"0" * 20_000)
    (tmp_path / "a.txt.zst").write_bytes(skipped + frames[0] + zeros + frames[1] + skipped)
    assert load_data(settings_for(tmp_path / "a.txt.zst"), chatty)[0].text_row(0, 64).input_ids


def test_files_that_cannot_be_read_are_named(tmp_path, tokenizer):
    (tmp_path / "a.docx").write_bytes(b"x")
    for path in (tmp_path / "a.docx", tmp_path):
        with pytest.raises(
            ArgumentError, match=r"`dataset` must be a file that can be read, .*\.zst.*available: \.csv"
        ):
            load_data(settings_for(path), tokenizer)


def test_a_student_learns_from_chats_and_keeps_the_template(tmp_path, teacher, tokenizer):
    (tmp_path / "mine.jinja").write_text(CHATML)
    write(tmp_path / "a.jsonl", [{"messages": TWICE}] * 40)
    settings = settings_for(
        tmp_path / "a.jsonl", chat_template=str(tmp_path / "mine.jinja"), output_dir=str(tmp_path / "run"),
        window=4, sinks=1, block_tokens=64, rows=2, recall_share=0.25, transfer_steps=1, distill_steps=2,
        heldout_rows=2, progress=False,
    )  # fmt: skip
    result = distill(settings, teacher, tokenizer=byte_tokenizer())
    assert all(math.isfinite(record["loss_nats"]) for record in result.history)
    assert math.isfinite(result.metrics["student"]["loss_nats"])
    assert load_tokenizer(str(tmp_path / "run")).chat_template == CHATML
