"""A converted model drafts for a softmax model: the same answers, and a rollback of bounded size."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching import cache as cache_module
from hf_linear_attn.patching import convert_cache, hook
from hf_linear_attn.patching.call_cache import NAME

from .checks import SETTINGS, Subject, cache_sizes, close, patched, prompt
from .zoo import tiny_model

GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def pair(name="llama", settings="window"):
    """A softmax model, and a converted one that agrees with it now and then."""
    teacher = tiny_model("causal", name)
    student = patched(copy.deepcopy(teacher), **SETTINGS[settings])
    student.generation_config.num_assistant_tokens = 3
    student.generation_config.assistant_confidence_threshold = 0.0
    return teacher, student


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafted", [1, 4])
def test_a_student_drafts_what_its_teacher_answers(settings, drafted):
    teacher, student = pair(settings=settings)
    student.generation_config.num_assistant_tokens = drafted
    for tokens in (1, 2, 7, 40):
        ids = prompt(tokens, tokens)
        assert torch.equal(teacher.generate(ids, assistant_model=student, **GREEDY), teacher.generate(ids, **GREEDY))


def test_a_padding_token_may_be_answered():
    teacher, student = pair()
    ids = prompt(9)
    pad = int(teacher.generate(ids, **GREEDY)[0, 11])
    options = GREEDY | {"pad_token_id": pad}
    expected = teacher.generate(ids, **options)
    assert (expected[0, 9:] == pad).any()
    assert torch.equal(teacher.generate(ids, assistant_model=student, **options), expected)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma3_text"])
def test_architectures_draft(name):
    if name == "gemma3_text" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("Transformers' own sliding layers cannot be recorded there, a softmax assistant's neither")
    teacher, student = pair(name)
    student.generation_config.num_assistant_tokens_schedule = "heuristic"
    for tokens in (3, 30):
        ids = prompt(tokens, tokens)
        assert torch.equal(teacher.generate(ids, assistant_model=student, **GREEDY), teacher.generate(ids, **GREEDY))


def most_bytes(teacher, student, tokens):
    """Return the most bytes of the student's cache while it drafts after a prompt, and check what is answered."""
    ids = prompt(tokens)
    with cache_sizes(student) as held:
        found = teacher.generate(ids, assistant_model=student, **GREEDY)
    assert torch.equal(found, teacher.generate(ids, **GREEDY))
    assert len(held) > 4
    return max(held)


def test_what_a_rollback_needs_does_not_grow_with_the_prompt():
    teacher, student = pair()
    most = most_bytes(teacher, student, 1100)
    found = most_bytes(teacher, student, 2300)
    assert found <= most, (found, most)


@pytest.fixture
def four_recorded(monkeypatch):
    for module in (cache_module, hook):
        monkeypatch.setattr(module, "RECORDED", 4)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("pieces", [[13], [3, 10], [1] * 13, [4, 4, 5], [2, 7, 1, 1, 2], [3, 4, 3, 3]], ids=str)
def test_any_of_the_last_tokens_is_dropped_however_they_were_read(four_recorded, settings, pieces):
    subject = Subject(patched(tiny_model("causal", "llama"), **SETTINGS[settings]), "causal")
    ids = subject.tokens(18)
    whole = subject.logits(ids, use_cache=False)
    for dropped in range(5):
        cache = DynamicCache(config=subject.model.config)
        convert_cache(subject.model, cache)
        cache.activate_past_recording()
        for part in ids[:, :13].split(pieces, 1):
            subject.logits(part, **{NAME: cache})
            ours = [layer for layer in cache.layers if hasattr(layer, "recorded")]
            assert all(layer.recorded <= 8 for layer in ours)
        cache.crop(-dropped)
        assert cache.get_seq_length() == 13 - dropped
        a = subject.logits(ids[:, 13 - dropped : 15], **{NAME: cache})
        cache.crop(-1)
        b = subject.logits(ids[:, 14:], **{NAME: cache})
        close(torch.cat([a[:, :-1], b], 1), whole[:, 13 - dropped :], f"{dropped} dropped")


def test_what_lies_further_back_is_refused_in_words(four_recorded):
    subject = Subject(patch_model(tiny_model("causal", "llama"), "elu"), "causal")
    cache = DynamicCache(config=subject.model.config)
    convert_cache(subject.model, cache)
    cache.activate_past_recording()
    subject.logits(subject.tokens(13), **{NAME: cache})
    with pytest.raises(ArgumentError, match=r"`tokens_to_remove` must be from -4 to 0, .*got -5"):
        cache.crop(-5)


TOKENS, DRAWS = 8, 20_000
BOUND = 24.32
"""What a chi-squared variable of 7 degrees of freedom exceeds once in a thousand times."""


def statistic(drawn, probabilities, order):
    """Compare how often each rank was drawn with how likely that was, over all steps of all texts.

    Given are the tokens ``[N]``, the teacher's distributions at their places ``[N, TOKENS]``, and how to rank tokens.
    """
    ranked = probabilities.gather(1, order)
    found = (order == drawn[:, None]).double()
    difference = (found - ranked).sum(0)[:-1]
    covariance = (torch.diag_embed(ranked) - ranked[:, :, None] * ranked[:, None]).sum(0)[:-1, :-1]
    return float(difference @ torch.linalg.solve(covariance, difference))


def distributions(model, texts):
    with torch.no_grad():
        logits = torch.cat([model(text).logits[0, 1:-1] for text in texts])
    return logits.double().softmax(-1)


@pytest.mark.slow
def test_what_is_sampled_with_drafts_has_the_teachers_distribution():
    teacher = tiny_model("causal", "llama", vocab_size=TOKENS)
    student = patched(copy.deepcopy(teacher), **SETTINGS["window"])
    student.generation_config.assistant_confidence_threshold = 0.0
    student.generation_config.num_assistant_tokens = 4
    ids, new = torch.tensor([[5, 6]]), 200
    options = {"max_new_tokens": new, "do_sample": True, "eos_token_id": None, "pad_token_id": 0, "top_k": 0}
    torch.manual_seed(0)
    rows = DRAWS // new
    drafted = [teacher.generate(ids, assistant_model=student, **options) for _ in range(rows)]
    alone = [student.generate(ids, **options) for _ in range(rows)]
    found = []
    for texts in (drafted, alone):
        p, q = distributions(teacher, texts), distributions(student, texts)
        drawn = torch.cat([text[0, 2:] for text in texts])
        assert len(drawn) == DRAWS
        # Where the student is too sure of a token, too many of it would be a sign of the draft.
        found.append(statistic(drawn, p, (p - q).argsort(1)))
    assert found[0] < BOUND
    # The student's own draws are told apart from the teacher's.
    assert found[1] > 10 * BOUND
