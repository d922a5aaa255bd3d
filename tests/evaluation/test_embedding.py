import pytest
import torch
import torch.nn.functional as F

from hf_linear_attn.encoders import Frame, Pooling
from hf_linear_attn.evaluation.embedding import compare_embeddings, embed_all, likeness, retrieval
from tests.distill.tiny_encoders import tiny_bert

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
