import json

import pytest
import torch
from datasets import Dataset

from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.data import DocumentBlocks, RecallRows, StreamBlocks, load_data, sequences_of
from hf_linear_attn.errors import ArgumentError

DOCUMENTS = [list(range(100 * n, 100 * n + size)) for n, size in ((1, 7), (2, 30), (3, 12), (4, 25))]


def test_a_block_lies_within_one_document_and_an_epoch_reads_every_token():
    blocks = DocumentBlocks(DOCUMENTS, bos=[9999], seed=0, shortest=11)
    count = len(blocks.places(11))
    read = set()
    for number in range(count):
        bos, *body = blocks.block(number, 11)
        assert bos == 9999
        assert body == list(range(body[0], body[0] + 10))
        assert len({token // 100 for token in body}) == 1
        read.update(body)
    assert read == {token for document in DOCUMENTS[1:] for token in document}


def test_epochs_have_the_same_blocks_in_another_order():
    blocks = DocumentBlocks(DOCUMENTS, bos=[], seed=0, shortest=5)
    count = len(blocks.places(5))
    first = [tuple(blocks.block(number, 5)) for number in range(count)]
    second = [tuple(blocks.block(number, 5)) for number in range(count, 2 * count)]
    assert sorted(first) == sorted(second)
    assert first != second


def test_documents_shorter_than_a_block_are_refused_if_all_are():
    message = "`block_tokens` must be at most 30, the longest document's tokens, got 31"
    with pytest.raises(ArgumentError, match=message):
        DocumentBlocks(DOCUMENTS, bos=[], seed=0, shortest=31).block(0, 31)
    with pytest.raises(ArgumentError, match=message):
        StreamBlocks(DOCUMENTS, bos=[], shortest=31).block(0, 31)


def test_streams_give_any_block_and_start_over_at_their_end():
    blocks = StreamBlocks(DOCUMENTS, bos=[], shortest=10)
    read = [blocks.block(number, 10) for number in range(7)]
    assert read[:3] == [list(range(start, start + 10)) for start in (200, 210, 220)]
    assert read[6] == read[0]
    assert StreamBlocks(DOCUMENTS, bos=[], shortest=10).block(4, 10) == read[4]
    assert blocks.block(2, 10) == read[2]


def test_a_document_that_does_not_fill_a_longer_block_is_one_of_its_own():
    blocks = DocumentBlocks(DOCUMENTS, bos=[9999], seed=0, shortest=11)
    read = sorted(blocks.block(number, 26) for number in range(len(blocks.places(26))))
    assert [(len(row), row[1]) for row in read] == [(26, 200), (26, 205), (13, 300), (26, 400)]
    stream = StreamBlocks(DOCUMENTS, bos=[9999], shortest=11)
    assert [len(stream.block(number, 26)) for number in range(4)] == [26, 13, 26, 26]
    assert stream.block(1, 11) == [9999, *range(210, 220)]
    assert stream.block(4, 26) == stream.block(1, 26)


def test_steps_read_as_many_tokens_whatever_the_length():
    settings = DistillationSettings(rows=4, block_tokens=16)
    steps = [sequences_of(settings, "distill", step, rows_per_step=8) for step in range(6)]
    assert [(s.length, s.numbers, s.at_once) for s in steps] == [
        (16, range(8), 4),
        (32, range(4), 2),
        (64, range(2), 1),
        (16, range(8, 16), 4),
        (32, range(4, 8), 2),
        (64, range(2, 4), 1),
    ]
    # Later stages read on where these have stopped.
    assert sequences_of(settings, "extend", 6, rows_per_step=8) == (64, range(48, 56), 4)


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


def test_the_share_of_recall_sequences_is_exact(data, tokenizer):
    train, _ = data
    rows = [train.batch([number], 64) for number in range(40)]
    assert sum(bool((row.real & (row.weights == 0))[0, 1:].any()) for row in rows) == 10


@pytest.mark.parametrize("length", [24, 512])
def test_answers_of_recall_sequences_stand_in_their_context(tokenizer, length):
    rows = RecallRows(tokenizer, seed=0)
    for number in range(30):
        ids, asked = rows.row(number, length)
        assert len(ids) == len(asked) <= length
        assert any(asked)
        first = asked.index(True)
        text = tokenizer.decode(ids[:first])
        if text.startswith("<bos>Remember the code"):
            answers = tokenizer.decode([token for token, flag in zip(ids, asked, strict=True) if flag])
            for value in answers.rstrip(".").split("."):
                assert f" is{value}." in text


def test_a_recall_sequence_weighs_no_more_than_text(data):
    train, _ = data
    for number in range(20):
        _, weights = train.recall_row(number, 64)
        assert 0 < sum(weights) <= 64 + 1e-6


def write_documents(folder, count=25, size=400):
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": f"{n} " * size, "id": n}) + "\n" for n in range(count)))
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_local_files_are_read(tmp_path, tokenizer, streaming):
    settings = DistillationSettings(
        dataset=str(write_documents(tmp_path)), text_column="body", block_tokens=32, rows=2, streaming=streaming
    )
    train, heldout = load_data(settings, tokenizer)
    texts = [{tokenizer.decode(d.text_row(n, 32)[0][1:]).strip() for n in range(20)} for d in (train, heldout)]
    assert texts[0].isdisjoint(texts[1])


def test_text_and_parquet_files_are_read(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("line one\n\nline two\n" * 100)
    settings = DistillationSettings(dataset=str(tmp_path / "a.txt"), block_tokens=40, rows=1, distill_steps=2)
    train, _ = load_data(settings, tokenizer)
    assert "\n\nline" in tokenizer.decode(train.text_row(0, 40)[0])
    Dataset.from_dict({"text": ["word " * 90] * 30}).to_parquet(tmp_path / "b.parquet")
    settings = settings.with_changes(dataset=str(tmp_path / "b.parquet"))
    assert "word word" in tokenizer.decode(load_data(settings, tokenizer)[0].text_row(0, 40)[0])
    with pytest.raises(ArgumentError, match="`dataset` must be a file or folder of one kind of file"):
        load_data(settings.with_changes(dataset=str(tmp_path)), tokenizer)


def test_bad_datasets_are_refused(tmp_path, tokenizer):
    path = write_documents(tmp_path, count=3, size=40)
    settings = DistillationSettings(dataset=str(path), block_tokens=32, rows=1)
    with pytest.raises(ArgumentError, match=r"`text_column` must be a column .*'text'.*available: body, id"):
        load_data(settings, tokenizer)
    settings = settings.with_changes(text_column="body")
    with pytest.raises(ArgumentError, match="`block_tokens` must be at most"):
        load_data(settings.with_changes(block_tokens=500), tokenizer)
    with pytest.raises(ArgumentError, match="`rows` must leave every one of 10 processes a row"):
        load_data(settings, tokenizer, processes=10)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", " \n\n"), ("a.jsonl", '{"text": ""}\n')])
def test_empty_datasets_are_named(tmp_path, tokenizer, name, content, streaming):
    (tmp_path / name).write_text(content)
    settings = DistillationSettings(dataset=str(tmp_path / name), streaming=streaming)
    with pytest.raises(ArgumentError, match=r"`dataset` must hold text in the column 'text', got '.*'\. It is empty"):
        load_data(settings, tokenizer)
