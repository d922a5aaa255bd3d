import copy
import itertools
import json
import random
import re
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill import data as data_package
from hf_linear_attn.distill.data import (
    Blocking,
    Data,
    Document,
    DocumentBlocks,
    RecallRows,
    Row,
    StreamBlocks,
    load_data,
    tokens_read,
)
from hf_linear_attn.distill.data.recall import training_task
from hf_linear_attn.distill.forward import predictions
from hf_linear_attn.distill.stages import stage_class
from hf_linear_attn.distill.stages.transfer import teacher_forced
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.evaluation.tasks import Text, available_tasks, get_task
from hf_linear_attn.evaluation.tasks.base import bos_ids
from hf_linear_attn.evaluation.tasks.words import ADJECTIVES, COMMON, MADE_UP_KEYS, MADE_UP_VALUES, NOUNS

DOCUMENTS = [Document(range(100 * n, 100 * n + size)) for n, size in ((1, 7), (2, 30), (3, 12), (4, 25))]


def test_long_documents_fill_blocks_by_themselves_and_short_ones_share_one():
    blocks = DocumentBlocks(DOCUMENTS, Blocking([9999], 11), seed=0)
    rows = sorted(blocks.block(number, 21) for number in range(len(blocks.places(21))))
    assert [(row.input_ids, row.starts) for row in rows] == [
        ([9999, *range(100, 107), 9999, *range(300, 312)], [0, 8]),
        ([9999, *range(200, 220)], [0]),
        ([9999, *range(210, 230)], [0]),
        ([9999, *range(400, 420)], [0]),
        ([9999, *range(405, 425)], [0]),
    ]
    assert rows[0].weights == [0.0] + [1.0] * 7 + [0.0] + [1.0] * 12
    alone = DocumentBlocks(DOCUMENTS, Blocking([9999], 11, pack=False), seed=0)
    assert sorted(len(alone.block(number, 21).input_ids) for number in range(6)) == [8, 13, 21, 21, 21, 21]


def test_epochs_have_the_same_blocks_in_another_order():
    blocks = DocumentBlocks(DOCUMENTS, Blocking([], 5), seed=0)
    count = len(blocks.places(5))
    first = [blocks.block(number, 5) for number in range(count)]
    second = [blocks.block(number, 5) for number in range(count, 2 * count)]
    assert sorted(first) == sorted(second)
    assert first != second


def test_documents_shorter_than_a_block_are_refused_if_all_are():
    message = "`block_tokens` must be at most 30, the longest document's tokens, got 31"
    with pytest.raises(ArgumentError, match=message):
        DocumentBlocks(DOCUMENTS, Blocking([], 31), seed=0).block(0, 31)
    stream = StreamBlocks(DOCUMENTS, Blocking([], 31))
    with pytest.raises(ArgumentError, match=message):
        [stream.block(number, 31) for number in range(9)]


def test_streams_give_any_block_and_start_over_at_their_end():
    stream = StreamBlocks(DOCUMENTS, Blocking([9999], 10))
    whole = DocumentBlocks(DOCUMENTS, Blocking([9999], 10), seed=0)
    for length in (10, 21, 10):
        count = len(whole.places(length))
        read = [stream.block(number, length) for number in range(count)]
        assert sorted(read) == sorted(whole.block(number, length) for number in range(count))
        assert stream.block(count, length) == read[0]
        assert stream.block(2, length) == read[2]
        assert StreamBlocks(DOCUMENTS, Blocking([9999], 10)).block(4, length) == read[4]


def test_packed_documents_are_predicted_as_if_alone(teacher, tokenizer):
    rng = random.Random(0)
    documents = [Document([rng.randrange(3, 250) for _ in range(size)]) for size in (9, 12, 30, 7)]
    blocks = DocumentBlocks(documents, Blocking(bos_ids(tokenizer), 16), seed=0)
    data = Data(blocks, RecallRows(tokenizer, seed=0), recall_share=0.0, answer_weight=1.0, pad=0)
    packed = data.batch([0, 1], 32)
    assert packed.position_ids is not None
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4, sinks=1)
    for model in (teacher, student):
        alone = []
        for number in (0, 1):
            row = data.text_row(number, 32)
            for start, end in zip(row.starts, [*row.starts[1:], len(row.input_ids)], strict=True):
                alone.append(
                    predictions(
                        model, data.collate([Row(row.input_ids[start:end], row.weights[start:end])], end - start)
                    )
                )
        together = predictions(model, packed)
        for index in range(3):
            torch.testing.assert_close(together[index], torch.cat([x[index] for x in alone]), rtol=1e-4, atol=1e-5)
    # What transfer teaches is the softmax model itself.
    with teacher_forced(student, lambda part, output, softmax: None):
        torch.testing.assert_close(
            predictions(student, packed)[2], predictions(teacher, packed)[2], rtol=1e-4, atol=1e-5
        )


def test_steps_read_as_many_tokens_whatever_the_length():
    settings = DistillationSettings(rows=4, block_tokens=16)
    steps = [stage_class("distill").sequences(settings, step, rows_per_step=8) for step in range(6)]
    assert [(s.length, s.numbers, s.at_once) for s in steps] == [
        (16, range(8), 4),
        (32, range(4), 2),
        (64, range(2), 1),
        (16, range(8, 16), 4),
        (32, range(4, 8), 2),
        (64, range(2, 4), 1),
    ]
    # Later stages read on where these have stopped.
    assert stage_class("extend").sequences(settings, 6, rows_per_step=8) == (64, range(48, 56), 4)


@pytest.mark.parametrize(
    ("rows", "accumulation", "given", "factors"),
    [(4, 1, None, [1, 2, 4]), (2, 4, None, [1, 2]), (3, 1, None, [1]), (1, 8, [8], [8]), (6, 1, [3, 1], [3, 1])],
)
def test_lengths_fit_the_rows(rows, accumulation, given, factors):
    settings = DistillationSettings(rows=rows, accumulation=accumulation, length_factors=given)
    assert settings.factors() == factors


@pytest.mark.parametrize("factors", [[], [0], [1, 4], [-1]])
def test_lengths_that_do_not_fit_the_rows_are_refused(factors):
    with pytest.raises(ArgumentError, match="`length_factors` must be divisors of `rows` times `accumulation`, 6"):
        DistillationSettings(rows=3, accumulation=2, length_factors=factors)


def test_batches_depend_on_row_numbers_alone(data):
    train, _ = data
    whole = train.batch(range(12), 16)
    parts = [train.batch([number], 16) for number in range(12)]
    for name in ("input_ids", "weights", "real"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


def test_the_share_of_recall_sequences_is_exact(data):
    train, _ = data
    rows = [train.batch([number], 64) for number in range(40)]
    alone = [row for row in rows if row.position_ids is None]
    assert sum(bool((row.real & (row.weights == 0))[0, 1:].any()) for row in alone) == 10


def assert_pairs_stand_before_their_answers(tokenizer, ids, asked):
    ends = [i for i in range(1, len(ids)) if asked[i - 1] and not (asked[i : i + 1] or [False])[0]]
    for end in ends:
        *before, line = tokenizer.decode(ids[:end]).splitlines()
        assert line in before


@pytest.mark.parametrize("length", [24, 512])
def test_answers_of_recall_sequences_stand_in_their_context(tokenizer, length):
    rows = RecallRows(tokenizer, seed=0)
    for number in range(30):
        ids, asked = rows.row(number, length)
        assert len(ids) == len(asked) <= length
        assert any(asked)
        text = tokenizer.decode(ids[: asked.index(True)])
        if text.startswith("<bos>Remember the code"):
            assert_pairs_stand_before_their_answers(tokenizer, ids, asked)


@pytest.mark.parametrize("length", [8, 24, 512])
def test_a_repeated_segment_goes_on_as_it_did_before(tokenizer, length):
    rows = RecallRows(tokenizer, seed=0)
    for number in range(20):
        ids, asked = rows._repeat(length, random.Random(number))
        assert len(ids) == len(asked) <= length
        followed = list(itertools.pairwise(ids))
        assert any(asked)
        assert all(followed[i - 1] in followed[: i - 1] for i, flag in enumerate(asked) if flag)


def test_some_pairs_are_asked_for_at_once_and_some_from_far(tokenizer):
    rows = RecallRows(tokenizer, seed=0)
    distances = []
    for number in range(20):
        ids, _ = rows._pairs(2048, random.Random(number))
        seen: dict[str, int] = {}
        at = 0
        for line in tokenizer.decode(ids).splitlines(keepends=True):
            if line.startswith("The code"):
                distances.append(at - seen.setdefault(line, at))
            at += len(line)
    distances = [distance for distance in distances if distance]
    assert sum(distance < 60 for distance in distances) > len(distances) / 10
    assert sum(distance > 500 for distance in distances) > len(distances) / 3


def test_a_recall_sequence_weighs_no_more_than_text(data):
    train, _ = data
    for number in range(20):
        weights = train.recall_row(number, 64).weights
        assert 0 < sum(weights) <= 64 + 1e-6


def write_documents(folder, count=25, size=400):
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": f"{n} " * size, "id": n}) + "\n" for n in range(count)))
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_local_files_are_read(tmp_path, tokenizer, streaming):
    settings = DistillationSettings(
        dataset=str(write_documents(tmp_path)), columns="text=body", block_tokens=32, rows=2, streaming=streaming
    )
    train, heldout = load_data(settings, tokenizer)
    texts = [{tokenizer.decode(d.text_row(n, 32).input_ids[1:]).strip() for n in range(20)} for d in (train, heldout)]
    assert texts[0].isdisjoint(texts[1])


def test_no_more_of_a_dataset_is_read_than_a_run_needs(tokenizer, monkeypatch):
    read = []

    class Rows:
        column_names = ("text",)

        def __len__(self):
            return 10**6

        def __iter__(self):
            raise AssertionError("all of it is read")

        def __getitem__(self, index):
            read.append(index)
            return {"text": f"text {index} " * 40 if index % 3 else " \n"}

        def select_columns(self, columns):
            return self

    monkeypatch.setattr("hf_linear_attn.distill.data.source.Source._load", lambda source, streaming: [(Rows(), ())])
    settings = DistillationSettings(dataset="large", block_tokens=32, rows=2, distill_steps=20)
    train, heldout = load_data(settings, tokenizer)
    needed = tokens_read(settings, processes=1)
    assert needed < sum(len(document.ids) for document in train.blocks.documents) < 5 * needed
    assert len(set(read)) < 200
    assert heldout.text_row(0, 32).input_ids


def test_bad_datasets_are_refused(tmp_path, tokenizer):
    path = write_documents(tmp_path, count=3, size=40)
    settings = DistillationSettings(dataset=str(path), block_tokens=32, rows=1)
    with pytest.raises(ArgumentError, match=r"`columns` must name what is learned, .*'body', 'id'.*available: .* text"):
        load_data(settings, tokenizer)
    settings = settings.with_changes(columns="text=body")
    with pytest.raises(ArgumentError, match="`block_tokens` must be at most"):
        load_data(settings.with_changes(block_tokens=500), tokenizer)
    with pytest.raises(ArgumentError, match="`rows` must leave every one of 10 processes a row"):
        load_data(settings, tokenizer, processes=10)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", " \n\n"), ("a.jsonl", '{"text": ""}\n')])
def test_empty_datasets_are_named(tmp_path, tokenizer, name, content, streaming):
    (tmp_path / name).write_text(content)
    settings = DistillationSettings(dataset=str(tmp_path / name), streaming=streaming)
    with pytest.raises(ArgumentError, match=r"`dataset` must hold text, got '.*'\. It is empty"):
        load_data(settings, tokenizer)


HELD_OUT = available_tasks(held_out=True)
HELD_OUT_WORDS = {*MADE_UP_KEYS, *MADE_UP_VALUES}


def row_makers():
    """Return the classes of the package that generate rows."""
    modules = [import_module(f"{data_package.__name__}.{one.name}") for one in iter_modules(data_package.__path__)]
    found = {
        one for module in modules for one in vars(module).values() if isinstance(one, type) and hasattr(one, "row")
    }
    return {one for one in found if one.__module__.startswith(data_package.__name__)}


def test_no_generated_row_has_a_held_out_form_or_a_word_of_one(tokenizer):
    # A new generator has to be looked at here, too.
    assert row_makers() == {RecallRows}
    rows = RecallRows(tokenizer, seed=0)
    said = "\n".join(
        tokenizer.decode(rows.row(number, length)[0]) for length in (256, 512, 1024) for number in range(150)
    )
    assert len(HELD_OUT) >= 4
    for name in HELD_OUT:
        pair = get_task(name).pair.format(key="KEY", value="VALUE").strip()
        pattern = re.escape(pair).replace("KEY", r"\w+").replace("VALUE", r"\w+")
        assert re.search(pattern, get_task(name).pair.format(key="Bine", value="Mure"))
        assert not re.search(pattern, said), name
    assert not HELD_OUT_WORDS & set(re.findall(r"[a-z]+", said.lower()))
    assert not HELD_OUT_WORDS & {*NOUNS, *ADJECTIVES, *COMMON}


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_held_out_form_asked_for_in_training_is_refused_by_name(name):
    message = rf"`task` must not be held out of training, got '{name}'.*available: copying, cwe, fwe, kv_recall"
    with pytest.raises(ArgumentError, match=message):
        training_task(name)


def test_text_that_needles_are_hidden_in_is_never_read_in_training(tokenizer):
    read, hidden = load_stdlib_documents("train"), Text().documents()
    assert not set(read) & set(hidden)
    assert not HELD_OUT_WORDS & set(re.findall(r"[a-z]+", "\n".join(read).lower()))
    settings = DistillationSettings(block_tokens=64, transfer_steps=4, distill_steps=4, rows=1)
    documents = load_data(settings, tokenizer)[0].blocks.documents
    texts = {tokenizer.decode(document.ids, skip_special_tokens=True) for document in documents}
    assert texts
    assert texts <= set(read)
