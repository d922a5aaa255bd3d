import copy
import json

import jsonschema
import pytest
import torch
import torch.nn.functional as F

from hf_linear_attn import patch_model
from hf_linear_attn.encoders import Frame, Pooling
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.evaluation import EvaluationSettings, evaluate, schema
from hf_linear_attn.evaluation.embedding import compare_embeddings, embed_all, likeness, retrieval
from hf_linear_attn.evaluation.report import write_report
from hf_linear_attn.evaluation.suites.embedding import Embedding
from tests.distill.tiny_encoders import framing_tokenizer, tiny_bert

FRAME = Frame((2,), (3,))


def test_ranks():
    candidates = torch.eye(4)
    queries = torch.tensor([[9.0, 1, 1, 1], [5, 4, 1, 1], [7, 6, 5, 4], [1, 1, 1, 1]])
    found = retrieval(queries, candidates)
    # Ranks 1, 2 and 3; the last query finds all alike, so it finds its own last.
    assert found["mean_reciprocal_rank"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert found["top1"] == 0.25


def test_what_tells_no_texts_apart_finds_none():
    same = torch.ones(5, 3) / 3**0.5
    assert retrieval(same, same)["top1"] == 0
    assert likeness(same, same)["between_texts"] == pytest.approx(1)


def test_likeness():
    teacher = torch.eye(3)
    student = F.normalize(torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, -1]]), dim=-1)
    found = likeness(student, teacher)
    assert found["cosine_mean"] == pytest.approx((1 + 0.5**0.5 - 1) / 3)
    assert found["cosine_min"] == pytest.approx(-1)
    assert found["between_texts"] == 0


def test_embeddings_do_not_depend_on_order_or_padding():
    model = tiny_bert()
    texts = [list(range(5, 5 + size)) for size in (30, 1, 12, 60, 5)]
    for batch in (1, 2, 5):
        found = embed_all(model, texts, FRAME, Pooling(), pad=0, batch=batch)
        torch.testing.assert_close(found, embed_all(model, texts, FRAME, Pooling(), pad=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(5))


def test_a_model_is_compared_with_its_teacher():
    model = tiny_bert()
    texts = [list(range(5 + n, 25 + n)) for n in range(6)]
    found = compare_embeddings({"teacher": model, "student": model}, texts, FRAME, Pooling(), pad=0)
    assert found["student"]["cosine_mean"] == pytest.approx(1)
    assert {name: value for name, value in found["student"].items() if name in found["teacher"]} == found["teacher"]
    assert "cosine_mean" not in compare_embeddings({"student": model}, texts, FRAME, Pooling(), pad=0)["student"]


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text, and {n * n} more\n" for n in range(60)))
    return str(tmp_path / "text.txt")


def test_the_suite_compares_a_student_with_its_teacher(tmp_path, texts):
    teacher = tiny_bert()
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")

    def run(**changes):
        settings = EvaluationSettings(
            suite=("embedding",), output_dir=str(tmp_path / "run"), embedding_lengths=(16, 64, 512), embedding_texts=8,
            embedding_file=texts, embedding_repeats=1, progress=False, **changes,
        )  # fmt: skip
        return evaluate(settings, model=student, teacher=teacher, tokenizer=framing_tokenizer())

    results = run()
    jsonschema.validate(json.loads(json.dumps(results)), schema())
    rows = {(row["model"], row["length"]): row for row in results["embedding"]}
    assert rows["model", 512]["status"] == "unsupported"
    assert "130 learned positions" in rows["model", 512]["reason"]
    for length in (16, 64):
        assert 0 < rows["model", length]["cosine_mean"] < 1
        assert rows["teacher", length]["cosine_mean"] is None
        assert rows["model", length]["ms_per_text"] > 0
        assert rows["model", length]["texts"] == 8
    write_report(results, tmp_path / "run")
    report = (tmp_path / "run" / "report.md").read_text()
    assert "mean cosine to the teacher at 64 tokens" in report
    assert "finds the second half" in report
    # What is on disk is not measured again.
    assert run(resume=True)["embedding"] == results["embedding"]


def test_suites_of_two_kinds_do_not_run_together(texts):
    settings = EvaluationSettings(suite=("perplexity", "embedding"), progress=False)
    with pytest.raises(ArgumentError, match=r"`suite` must be for one kind of model.*available: embedding"):
        evaluate(settings, model=tiny_bert(), tokenizer=framing_tokenizer())


def test_an_encoder_is_loaded_with_all_its_weights(tmp_path, texts):
    model = tiny_bert()
    state = {name: x for name, x in model.state_dict().items() if "layer.1." not in name}
    model.save_pretrained(tmp_path / "broken", state_dict=state)
    framing_tokenizer().save_pretrained(tmp_path / "broken")
    settings = EvaluationSettings(
        model=str(tmp_path / "broken"), suite=("embedding",), embedding_file=texts, embedding_lengths=(16,),
        progress=False,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"`model` must hold all weights of an encoder.*lacks encoder\.layer\.1"):
        evaluate(settings)


def test_lengths_without_texts_are_refused(texts):
    settings = EvaluationSettings(
        suite=("embedding",), embedding_file=texts, embedding_lengths=(16, 100000), progress=False
    )
    with pytest.raises(ArgumentError, match="`embedding_lengths` must leave two texts at least, got 100000"):
        evaluate(settings, model=tiny_bert(), tokenizer=framing_tokenizer())


@pytest.mark.parametrize(
    ("ms", "said"), [(2.0, "2.0x faster than"), (0.5, "2.0x slower than"), (1.0, "about as fast as")]
)
def test_speed_is_a_sentence_whichever_is_faster(ms, said):
    rows = [
        {"model": name, "length": 64, "status": "ok", "ms_per_text": t} for name, t in (("model", 1.0), ("teacher", ms))
    ]
    results = {
        "model": {"name": "model"}, "references": [{"name": "teacher", "role": "teacher"}], "embedding": rows,
    }  # fmt: skip
    assert Embedding.speed(results) == [f"A text of 64 tokens is embedded {said} by teacher."]
