"""Recall sequences that are set into text: what is in them, which of them are, and what is refused."""

import json
import re

import pytest
import torch

from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.card import recall_sentence
from hf_linear_attn.distill.data import RecallRows, load_data
from hf_linear_attn.distill.data.passages import InText, passages_of
from hf_linear_attn.distill.data.steps import numbers_before
from hf_linear_attn.distill.stages import stage_class
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.evaluation.tasks import available_tasks, get_task
from hf_linear_attn.evaluation.tasks.base import NOISE_SENTENCES
from hf_linear_attn.evaluation.tasks.words import MADE_UP_KEYS, MADE_UP_VALUES
from tests.distill.test_data import assert_pairs_stand_before_their_answers
from tests.distill.test_run import StoppedError, stop_at
from tests.distill.tiny import same

LENGTHS = (256, 512, 1024)
SHORT = {"block_tokens": 64, "rows": 4, "length_factors": [1, 2], "recall_share": 0.5}


@pytest.fixture(scope="module")
def train(tokenizer):
    settings = DistillationSettings(recall_text=1.0, block_tokens=256, transfer_steps=40, distill_steps=40)
    return load_data(settings, tokenizer)[0]


@pytest.fixture(scope="module")
def said(train, tokenizer):
    rows = [train.recall.row(number, length)[0] for length in LENGTHS for number in range(60)]
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]


def in_noise(text):
    return any(sentence in text for sentence in NOISE_SENTENCES)


def text_rows(data, numbers, length, tokenizer):
    """Return the numbers of recall sequences that are set into text."""
    plain = RecallRows(tokenizer, seed=0)
    return [number for number in numbers if data.recall.row(number, length) != plain.row(number, length)]


def test_needles_stand_in_training_text_and_their_answers_are_what_is_learned(train, tokenizer):
    kinds, text = set(), tokenizer.decode(train.recall.in_text.passages.ids)
    for length in LENGTHS:
        for number in range(40):
            ids, asked = train.recall.row(number, length)
            assert len(ids) == len(asked) <= length
            assert any(asked)
            assert not in_noise(tokenizer.decode(ids))
            head, *lines = tokenizer.decode(ids[: asked.index(True)], skip_special_tokens=True).splitlines()
            if not head.startswith("Remember the code"):
                continue
            kinds.add(length)
            assert len(ids) > 0.85 * length
            pairs = [n for n, line in enumerate(lines) if re.fullmatch(r"The code of \w+ is \w+\.", line)]
            # What surrounds a needle is a line of the training text.
            around = {lines[n + 1] for n in pairs[:-1] if n + 1 not in pairs}
            assert around
            assert all(line in text for line in around)
            assert_pairs_stand_before_their_answers(tokenizer, ids, asked)
    # Two pairs do not fit into 256 bytes.
    assert kinds == {512, 1024}


def test_some_pairs_in_text_are_asked_for_from_near_and_some_from_far(said):
    distances = []
    for text in said[2 * len(said) // 3 :]:
        found: dict[str, int] = {}
        for line in re.finditer(r"^The code of \w+ is \w+\.$", text, re.MULTILINE):
            distances.append(line.start() - found.setdefault(line.group(), line.start()))
    distances = [distance for distance in distances if distance]
    assert sum(distance < 60 for distance in distances) > len(distances) / 20
    assert sum(distance > 500 for distance in distances) > len(distances) / 5


def test_no_training_row_has_text_or_forms_or_words_that_are_held_out(train, said, tokenizer):
    hidden = "\n".join(load_stdlib_documents("heldout"))
    read = "\n".join(load_stdlib_documents("train"))
    passages = tokenizer.decode(train.recall.in_text.passages.ids)
    # Licences and imports are alike in several files.
    pieces = [passages[at : at + 120] for at in range(0, len(passages) - 120, len(passages) // 300)]
    assert sum(piece in read for piece in pieces) > 0.9 * len(pieces)
    assert not [piece for piece in pieces if piece in hidden and piece not in read]
    joined = "\n".join(said)
    for name in available_tasks(held_out=True):
        keys, values = get_task(name).keys, get_task(name).values
        pattern = re.escape(get_task(name).pair.format(key="KEY", value="VALUE").strip())
        pattern = pattern.replace("KEY", f"(?:{'|'.join(keys)})").replace("VALUE", f"(?:{'|'.join(values)})")
        assert not re.search(pattern, joined), name
    # A stretch may begin inside a word, and a segment that comes again is of any bytes.
    lines = [line for line in joined.splitlines() if re.search("The code of|pass key|magic number", line)]
    assert len(lines) > 500
    for text in ("\n".join(lines), passages):
        assert not {*MADE_UP_KEYS, *MADE_UP_VALUES} & set(re.findall(r"[a-z]+", text.lower()))


def test_held_out_text_of_a_dataset_is_in_no_recall_row(tmp_path, tokenizer):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"<{n}>\n" * 40}) + "\n" for n in range(100, 160)))
    for streaming in (False, True):
        settings = DistillationSettings(dataset=str(path), streaming=streaming, recall_text=1.0, **SHORT)
        train, heldout = load_data(settings, tokenizer)
        read = set(re.findall(r"<\d+>", tokenizer.decode(train.recall.in_text.passages.ids)))
        kept = "".join(tokenizer.decode(heldout.text_row(n, 64).input_ids) for n in range(20))
        assert read
        assert not read & set(re.findall(r"<\d+>", kept))
        assert heldout.recall.in_text is None
        assert not {3, *tokenizer.all_special_ids} & set(train.recall.in_text.passages.ids)


def test_each_dataset_gives_its_share_of_the_text(tmp_path, tokenizer):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 4000)
    paths = [str(tmp_path / f"{name}.txt") for name in "ab"]
    settings = DistillationSettings(dataset=paths, dataset_weights=[3, 1], recall_text=0.5, **SHORT)
    train, _ = load_data(settings, tokenizer)
    text = tokenizer.decode(passages_of(train.blocks, tokenizer, most=400).ids)
    assert (text.count("a"), text.count("b")) == (300, 100)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.7, 1.0])
def test_the_share_in_text_holds_in_any_run_of_rows(train, tokenizer, share):
    in_text = InText(train.recall.in_text.passages, share, {})
    chosen = [in_text.haystack(number, 256) is not None for number in range(100)]
    assert all(abs(sum(chosen[at : at + 20]) - 20 * share) <= 1 for at in range(80))
    rows = RecallRows(tokenizer, seed=0, in_text=in_text)
    plain = RecallRows(tokenizer, seed=0)
    for number in range(30):
        same = rows.row(number, 256) == plain.row(number, 256)
        assert same != chosen[number]


def test_all_is_noise_until_the_steps_share_and_text_from_it_on(tokenizer):
    stages = {"stages": ["transfer", "distill", "extend"], "transfer_steps": 6, "distill_steps": 10, "extend_steps": 4}
    settings = DistillationSettings(recall_text=1.0, recall_text_from=0.5, **stages, **SHORT)
    train, _ = load_data(settings, tokenizer)
    names = ["transfer"] * 6 + ["distill"] * 10 + ["extend"] * 4
    for step, name in enumerate(names):
        length, numbers, _ = stage_class(name).sequences(settings, step, 4)
        recalls = [int(n * 0.5) for n in numbers if int((n + 1) * 0.5) > int(n * 0.5)]
        found = text_rows(train, recalls, length, tokenizer)
        assert found == (recalls if step >= 10 else []), step
    assert numbers_before(settings, 1, 0.0) == {}
    # As many rows over two processes as over one of twice the rows.
    spread = settings.with_changes(accumulation=2)
    assert numbers_before(spread, 1, 0.5) == numbers_before(settings, 2, 0.5) != numbers_before(settings, 1, 0.5)


def test_rows_are_the_same_in_another_run_and_over_more_processes(tokenizer):
    settings = DistillationSettings(recall_text=0.5, recall_text_from=0.25, distill_steps=20, **SHORT)
    whole, _ = load_data(settings.with_changes(accumulation=2), tokenizer)
    parts, _ = load_data(settings, tokenizer, processes=2)
    for length, numbers in ((64, range(160)), (128, range(80))):
        batch = whole.batch(numbers, length)
        # A run that resumes asks for later rows first.
        later = [parts.batch([number], length).input_ids for number in reversed(numbers)]
        assert torch.equal(batch.input_ids, torch.cat(later[::-1]))


def test_a_run_resumes_to_the_same_bits_and_refuses_another_share(settings, teacher, tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text\n" for n in range(400)))
    changes = {"dataset": str(tmp_path / "text.txt"), "recall_share": 0.5, "recall_text": 1.0, "block_tokens": 64}
    settings = settings.with_changes(recall_text_from=0.5, length_factors=[1], **changes)
    stopped = settings.with_changes(output_dir=str(tmp_path / "run"))
    # It stops in the sixth of seven steps; from the fifth on recall sequences are in text.
    with pytest.raises(StoppedError):
        distill(stopped, teacher=teacher, tokenizer=tokenizer, on_step=stop_at(3))
    with pytest.raises(ArgumentError, match=r"Changed: recall_text 1.0 -> 0.5"):
        distill(stopped.with_changes(recall_text=0.5), teacher=teacher, tokenizer=tokenizer)
    resumed = distill(stopped, teacher=teacher, tokenizer=tokenizer).student
    whole = distill(settings, teacher=teacher, tokenizer=tokenizer).student
    assert same(resumed, whole)
    plain = settings.with_changes(recall_text=0.0, recall_text_from=0.0)
    assert not same(whole, distill(plain, teacher=teacher, tokenizer=tokenizer).student)


def test_without_the_setting_nothing_is_set_into_text(tokenizer):
    train, _ = load_data(DistillationSettings(**SHORT), tokenizer)
    plain = RecallRows(tokenizer, seed=0)
    assert all(train.recall.row(number, 128) == plain.row(number, 128) for number in range(20))


def test_what_does_not_go_together_is_refused(tmp_path, tokenizer):
    for changes, message in (
        ({"recall_text": 1.5}, r"`recall_text` must lie in 0..1, got 1.5"),
        ({"recall_text": -0.1}, r"`recall_text` must lie in 0..1, got -0.1"),
        ({"recall_text": 0.5, "recall_text_from": 2.0}, r"`recall_text_from` must lie in 0..1, got 2.0"),
        ({"recall_text": 0.5, "recall_share": 0.0}, r"`recall_text` must be 0 where `recall_share` is, got 0.5"),
        ({"recall_text_from": 0.5}, r"`recall_text_from` must be 0 where `recall_text` is, got 0.5"),
    ):
        with pytest.raises(ArgumentError, match=message) as error:
            DistillationSettings(**changes)
        assert "\n" not in str(error.value)
    with pytest.raises(ArgumentError, match=r"`recall_text` must be 0.0 for an encoder, got 0.5"):
        DistillationSettings(stages=["transfer", "embed"], window=None, recall_text=0.5)
    (tmp_path / "short.txt").write_text("a line\n" * 17)
    short = SHORT | {"rows": 1, "accumulation": 2, "length_factors": [2]}
    settings = DistillationSettings(dataset=str(tmp_path / "short.txt"), recall_text=0.5, **short)
    rule = r"`recall_text` must be 0 where the training text, of \d+ tokens, is shorter .* of 128, got 0.5"
    with pytest.raises(ArgumentError, match=rule):
        load_data(settings, tokenizer)


def test_the_card_says_where_recall_tasks_stood():
    assert recall_sentence(DistillationSettings(recall_share=0.0)) == ""
    assert recall_sentence(DistillationSettings()).endswith("30% were generated recall tasks, in noise.")
    said = recall_sentence(DistillationSettings(recall_text=0.7, recall_text_from=0.5))
    assert said.endswith("70% of them set into training text, from 50% of the steps on; the others stood in noise.")
