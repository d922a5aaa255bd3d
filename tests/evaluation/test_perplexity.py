"""Perplexity, against what it must be: each token once, the same whatever the windows, chunks and batches."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.scoring import bucket, bucket_range, score_tokens
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.suites.perplexity import Perplexity
from hf_linear_attn.evaluation.text import (
    Corpus,
    Document,
    load_corpus,
    plan_final_windows,
    plan_windows,
    window_ids,
)
from tests.evaluation.helpers import (
    BOS,
    VOCABULARY,
    ScriptedModel,
    SmallModel,
    byte_tokenizer,
    subject,
    tiny_gpt2,
    tiny_linear,
    tiny_llama,
)


def settings(**options):
    return EvaluationSettings(
        **{"suite": ("perplexity",), "final_tokens": 16, "final_windows": 3, "progress": False, **options}
    )


def corpus_of(*lengths, bos=(BOS,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in lengths]
    skipped = 0 if bos else 1
    return Corpus(tuple(Document(row, len(row) - skipped) for row in rows), bos, "random bytes")


def run(subjects, corpus, chosen):
    store = SampleStore(None, chosen.identity(), {})
    suite = suite_of(subjects, corpus, chosen)
    suite.run(store, lambda tokens: None)
    return suite.collect(store)["perplexity"]


def suite_of(subjects, corpus, chosen):
    suite = Perplexity(chosen, subjects, byte_tokenizer())
    # A text that is given takes the place of the one to load.
    suite.corpus = corpus
    return suite


@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=4),
    window=st.integers(3, 60),
    step=st.floats(0.01, 1),
    bos=st.booleans(),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_windows_score_each_token_once_and_never_exceed_their_length(lengths, window, step, bos):
    corpus = corpus_of(*lengths, bos=(BOS,) if bos else ())
    size = window - 1
    windows = plan_windows(corpus, window, max(1, int(step * size)))
    scored = [(w.document, t) for w in windows for t in range(w.score_from, w.stop)]
    expected = [(d, t) for d, n in enumerate(lengths) for t in range(0 if bos else 1, n)]
    assert sorted(scored) == expected
    assert all(len(ids) <= window for ids in window_ids(corpus, windows))
    # Every scored token has something before it.
    assert all(w.score_from > w.start or bos for w in windows)


@pytest.mark.parametrize("bos", [True, False])
def test_uniform_logits_give_the_size_of_the_vocabulary(bos):
    model = subject(ScriptedModel(lambda ids: torch.zeros(VOCABULARY)))
    found = run([model], corpus_of(70, 33, bos=(BOS,) if bos else ()), settings(lengths=(32,), batch_size=3))
    (row,) = found["windows"]
    assert row["perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)
    assert row["tokens"] == (103 if bos else 101)
    assert row["bits_per_byte"] == pytest.approx(math.log2(VOCABULARY), rel=1e-6)
    assert row["perplexity_ci95"] == pytest.approx([VOCABULARY, VOCABULARY], rel=1e-6)


@pytest.mark.parametrize("make", [tiny_llama, tiny_linear, lambda: tiny_linear(window=None), tiny_gpt2])
def test_windowed_nll_equals_one_pass_whatever_the_chunk_and_the_batch(make):
    model, corpus = make(), corpus_of(70, 40, 21)
    expected = 0.0
    with torch.inference_mode():
        for document in corpus.documents:
            ids = torch.tensor([(BOS, *document.ids)])
            # Transformers' own loss: the mean over all tokens but the first.
            expected += float(model(ids, labels=ids).loss) * len(document.ids)
    for batch_size, chunk in ((1, 2048), (3, 16)):
        chosen = settings(lengths=(71,), batch_size=batch_size, prefill_chunk=chunk)
        (row,) = run([subject(model)], corpus, chosen)["windows"]
        assert row["tokens"] == 131
        assert row["nll_nats"] * 131 == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("make", [tiny_llama, tiny_linear])
@pytest.mark.parametrize("stride", [None, 9])
def test_strided_windows_equal_each_window_read_by_itself(make, stride):
    model, corpus = make(), corpus_of(60, 32)
    expected = 0.0
    with torch.inference_mode():
        for window in plan_windows(corpus, 32, stride):
            ids = torch.tensor(window_ids(corpus, [window]))
            log_p = model(ids).logits.log_softmax(-1)[0]
            for at in range(window.score_from - window.start, window.stop - window.start):
                expected -= float(log_p[at, ids[0, at + 1]])
    (row,) = run([subject(model)], corpus, settings(lengths=(32,), stride=stride, batch_size=2, prefill_chunk=8))[
        "windows"
    ]
    assert row["tokens"] == 92
    assert row["nll_nats"] * 92 == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("length", "stride", "batch_size"), [(90, None, 1), (16, None, 3), (16, 1, 4), (40, 7, 2)])
def test_windows_equal_one_pass_whatever_the_stride_for_a_model_that_looks_one_token_back(length, stride, batch_size):
    """For any other model a shorter context changes the loss; for this one only a wrong count could."""
    table = torch.randn(256, VOCABULARY, generator=torch.Generator().manual_seed(1))
    corpus = corpus_of(90, 33, bos=())
    expected = -sum(
        float(table[before].log_softmax(-1)[after])
        for document in corpus.documents
        for before, after in pairwise(document.ids)
    )
    chosen = settings(lengths=(length,), stride=stride, batch_size=batch_size)
    (row,) = run([subject(ScriptedModel(lambda ids: table[ids[-1]]))], corpus, chosen)["windows"]
    assert row["tokens"] == 89 + 32
    assert row["nll_nats"] * row["tokens"] == pytest.approx(expected, rel=1e-5)


def test_by_position_adds_up_to_the_whole():
    chosen = settings(lengths=(64, 200), batch_size=2)
    found = run([subject(tiny_linear())], corpus_of(400, 333), chosen)
    whole = next(row for row in found["windows"] if row["length"] == 200)
    rows = found["by_position"]
    assert [(row["start"], row["stop"]) for row in rows] == [(1, 64), (64, 128), (128, 200)]
    assert sum(row["tokens"] for row in rows) == whole["tokens"] == 733
    total = sum(row["tokens"] * row["nll_nats"] for row in rows)
    assert total == pytest.approx(733 * whole["nll_nats"], rel=1e-9)


@given(st.integers(1, 10**6))
def test_buckets_hold_their_positions(position):
    start, stop = bucket_range(bucket(position))
    assert start <= position < stop


def test_a_model_that_copies_gains_by_position_where_the_text_repeats():
    period = 70

    def copies(ids):
        logits = torch.zeros(VOCABULARY)
        if len(ids) >= period:
            logits[ids[-period]] = 20.0
        return logits

    row = tuple(range(period)) * 4
    corpus = Corpus((Document(row, len(row)),), (), "periodic")
    found = run([subject(ScriptedModel(copies))], corpus, settings(lengths=(128,), stride=64))
    first, second = found["by_position"]
    assert first["nll_nats"] == pytest.approx(math.log(VOCABULARY), rel=1e-4)
    # Six of the 64 positions come before the first repetition.
    assert second["nll_nats"] == pytest.approx(6 / 64 * math.log(VOCABULARY), rel=0.2)


def test_the_same_final_tokens_are_scored_under_growing_context():
    corpus = corpus_of(500, 300, 40)
    plans = {n: plan_final_windows(corpus, n, 256, 16, 5) for n in (64, 128, 256)}
    scored = {n: [(w.document, w.score_from, w.stop) for w in plan] for n, plan in plans.items()}
    assert scored[64] == scored[128] == scored[256]
    assert len(scored[64]) == 5
    assert all(len(ids) == n for n, plan in plans.items() for ids in window_ids(corpus, plan))
    found = run([subject(tiny_llama())], corpus, settings(lengths=(64, 256)))["growing_context"]
    assert [row["tokens"] for row in found] == [48, 48]
    assert found[0]["nll_nats"] != found[1]["nll_nats"]


def test_a_student_equal_to_its_teacher_has_no_distance_from_it():
    subjects = [subject(tiny_linear(), "model"), subject(tiny_linear(), "teacher", "teacher")]
    found = run(subjects, corpus_of(150), settings(lengths=(64,), prefill_chunk=16))
    mine, teacher = found["windows"]
    assert mine["kl_nats"] == 0.0
    assert mine["agreement"] == 1.0
    assert mine["nll_nats"] == teacher["nll_nats"]
    assert teacher["kl_nats"] is None


def test_kl_is_that_of_the_two_distributions():
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(VOCABULARY, generator=generator) for _ in range(2))
    subjects = [
        subject(ScriptedModel(lambda ids: q), "model"),
        subject(ScriptedModel(lambda ids: p), "teacher", "teacher"),
    ]
    (mine, _) = run(subjects, corpus_of(50), settings(lengths=(32,)))["windows"]
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )
    assert mine["kl_nats"] == pytest.approx(float(expected), rel=1e-5)
    assert mine["agreement"] == float(p.argmax() == q.argmax())


def test_a_word_the_teacher_rules_out_adds_nothing_to_the_distance():
    p = torch.zeros(VOCABULARY)
    p[5] = -math.inf
    subjects = [
        subject(ScriptedModel(lambda ids: p), "model"),
        subject(ScriptedModel(lambda ids: p), "teacher", "teacher"),
    ]
    corpus = Corpus((Document((1, 2, 3, 4) * 10, 40),), (BOS,), "without 5")
    assert run(subjects, corpus, settings(lengths=(32,)))["windows"][0]["kl_nats"] == 0.0


def test_other_vocabularies_share_no_distance_but_bits_per_byte():
    other = tiny_llama(vocab_size=300)
    subjects = [subject(tiny_llama(), "model"), subject(other, "teacher", "teacher")]
    mine, teacher = run(subjects, corpus_of(80), settings(lengths=(64,)))["windows"]
    assert mine["kl_nats"] is None
    assert mine["bits_per_byte"] > 0
    assert teacher["bits_per_byte"] > 0


def test_models_that_cannot_read_a_length_are_marked_and_the_others_are_measured():
    subjects = [
        subject(tiny_llama(), "model"),
        subject(tiny_gpt2(positions=50), "positions", "baseline"),
        subject(SmallModel(lambda ids: torch.zeros(VOCABULARY), 40), "memory", "baseline"),
    ]
    found = run(subjects, corpus_of(90), settings(lengths=(32, 64, 128), prefill_chunk=16))
    status = {(row["model"], row["length"]): row["status"] for row in found["windows"]}
    assert status == {
        ("model", 32): "ok", ("model", 64): "ok", ("model", 128): "unsupported",
        ("positions", 32): "ok", ("positions", 64): "unsupported", ("positions", 128): "unsupported",
        ("memory", 32): "ok", ("memory", 64): "out-of-memory", ("memory", 128): "unsupported",
    }  # fmt: skip
    lengths = {row["model"]: row["window_length"] for row in found["by_position"]}
    assert lengths == {"model": 64, "positions": 32, "memory": 32}


def test_the_cost_of_a_chunk_is_bounded_by_the_logits_it_makes(monkeypatch):
    monkeypatch.setattr("hf_linear_attn.evaluation.scoring._LOGITS_AT_ONCE", VOCABULARY * 2 * 8)
    seen = []
    score_tokens([subject(tiny_llama())], torch.zeros(2, 33, dtype=torch.long), 1, 2048, seen.append)
    assert seen == [16, 16, 16, 16, 2]


def test_bytes_are_those_of_the_scored_text(tmp_path):
    text = "Grüße, 世界! " * 30
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    for bos in (True, False):
        corpus = load_corpus(byte_tokenizer(bos=bos), str(path))
        facts = corpus.facts()
        assert facts["scored_bytes"] == len(text.encode()) - (0 if bos else 1)
        assert facts["scored_tokens"] == facts["scored_bytes"]
    cut = load_corpus(byte_tokenizer(), str(path), max_tokens=24)
    assert len(cut.documents[0].ids) == 24
    assert cut.documents[0].scored_bytes == len(text.encode()[:24])


def test_default_text_is_held_out_source_in_long_documents():
    corpus = load_corpus(byte_tokenizer(), max_tokens=2000)
    assert corpus.facts()["scored_tokens"] == 2000
    assert corpus.bos == (BOS,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"`text_file` must be a readable UTF-8 text, got .*missing.txt"),
        (b"\xff\xfe\x00", r"`text_file` must be a readable UTF-8 text"),
        (b"", r"`text_file` must hold at least two tokens of text"),
    ],
)
def test_an_unreadable_text_is_refused(tmp_path, content, message):
    path = tmp_path / "missing.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        load_corpus(byte_tokenizer(), str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (32,), "stride": 32}, r"`stride` must lie in 1..31, got 32 \(32 tokens\)"),
        ({"lengths": (64, 128)}, r"`lengths` must include one of at most 51 tokens, the longest document's, got"),
    ],
)
def test_windows_that_cannot_be_cut_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        suite_of([], corpus_of(50), settings(**options)).check()
