"""Learning which keys to keep: from the attention that is to come, and without a change to anything else."""

import copy

import pytest
import torch

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.data import Data
from hf_linear_attn.distill.data.blocks import Blocks
from hf_linear_attn.distill.data.rows import Row
from hf_linear_attn.distill.plan import plan
from hf_linear_attn.distill.retention import Text, attention_to_come, ranking_loss
from hf_linear_attn.distill.stages import retain
from hf_linear_attn.errors import ArgumentError
from tests.distill.test_run import StoppedError, go, stop_at
from tests.distill.tiny import same, tiny_teacher

LEARNED = {"kept": 3, "retention": "learned", "mix": "window", "stages": ["retain"], "retain_steps": 6}
HEADS = 2


class ShortBlocks(Blocks):
    def block(self, number, length):
        return Row(list(range(3, 20)), [1.0] * 17)


@pytest.fixture
def learning(settings):
    return settings.with_changes(**LEARNED, block_tokens=64)


def test_targets_are_the_most_attention_that_is_to_come():
    length, generator = 300, torch.Generator().manual_seed(0)
    q, k = (torch.randn(heads, length, 8, generator=generator, dtype=torch.float64) for heads in (2 * HEADS, HEADS))
    keys, times = torch.tensor([0, 3, 20, 36, 157, 158, 285, 286, 299]), [5, 12, 30]
    found = attention_to_come(Text(q, k, k[0]), keys, times, 0.3)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    weights = (0.3 * q @ k.repeat_interleave(2, 0).mT).masked_fill(~seen, -torch.inf).softmax(-1)
    for n, time in enumerate(times):
        most = weights[:, time:, keys].amax(1).unflatten(0, (HEADS, 2)).amax(1)
        torch.testing.assert_close(found[:, :, n].double(), most, rtol=1e-5, atol=1e-7)


def test_the_loss_is_least_where_scores_are_ordered_as_targets_are():
    """It is then the entropy of the targets; keys within the window count nowhere."""
    keys, times = torch.tensor([0, 2, 4, 30]), torch.tensor([10, 20])
    targets = torch.rand(HEADS, 4, 2, generator=torch.Generator().manual_seed(0))
    ranked = targets[:, :3] / targets[:, :3].sum(1, keepdim=True)
    entropy = torch.special.entr(ranked).sum(1).mean()
    equal = targets[:, :, :1].expand(-1, -1, 2)
    scores = equal[:, :, :1].log().expand(-1, -1, 6)
    best = ranking_loss(scores, equal, keys, times, 5)
    torch.testing.assert_close(best, torch.special.entr(ranked[..., 0]).sum(1).mean())
    assert ranking_loss(-scores, equal, keys, times, 5) > best + 0.1
    assert ranking_loss(torch.zeros_like(scores), targets, keys, times, 5) > entropy


def test_nothing_else_is_trained_and_what_was_learned_is_saved(learning, teacher, tokenizer, data, tmp_path):
    learning = learning.with_changes(output_dir=str(tmp_path / "run"), retain_steps=30, retain_lr=1e-2)
    result = go(learning, teacher, tokenizer, data)
    before, after = teacher.state_dict(), result.student.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    learned = {name for name in after.keys() - before.keys() if "retention" in name}
    assert len(learned) == 2 * 6
    assert all(after[name].any() for name in learned)
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(from_pretrained(tmp_path / "run")(ids).logits, result.student(ids).logits)


def test_it_finds_what_it_was_asked_for(learning, tokenizer, data):
    """Later attention goes to one kind of key in the whole of a text: those are kept, where the oldest would go."""
    teacher = tiny_teacher(layers=1, num_attention_heads=2, num_key_value_heads=1)
    learning = learning.with_changes(retain_steps=60, retain_lr=1e-2, kept=4)
    result = go(learning, teacher, tokenizer, data)
    untrained = learning.convert(copy.deepcopy(teacher))
    ids = torch.tensor(data[1].text_row(0, 64).input_ids[:48])[None]
    expected = teacher(ids).logits
    missed = [(model(ids).logits - expected).square().mean().item() for model in (untrained, result.student)]
    assert missed[1] < 0.95 * missed[0]


@pytest.mark.parametrize("texts", [0, 3])
def test_what_is_remembered_takes_no_more_memory_than_it_may(learning, teacher, tokenizer, data, monkeypatch, texts):
    """The newest text is remembered in any case, more where there is room, and all steps are taken."""
    learning, held, losses, loss = learning.with_changes(checkpoint_every=100), [], [], retain.Retain.loss

    def watched(stage, batch):
        if not held and texts:
            # As much as about so many texts take.
            monkeypatch.setattr(retain, "MEMORY", texts * size_of(stage._look(batch)[0]))
        losses.append(loss(stage, batch))
        held.append([size_of(text) for text in stage.seen])
        return losses[-1]

    monkeypatch.setattr(retain, "MEMORY", 1)
    monkeypatch.setattr(retain.Retain, "loss", watched)
    go(learning, teacher, tokenizer, data)
    assert len(losses) == LEARNED["retain_steps"]
    assert all(x.isfinite() for x in losses)
    assert all(sum(sizes) <= retain.MEMORY or len(sizes) == 1 for sizes in held)
    assert len(held[-1]) > 1 if texts else len(held[-1]) == 1


def size_of(text):
    return sum(x.nbytes for of in text.values() for x in of)


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(learning, teacher, tokenizer, data, tmp_path, step):
    learning = learning.with_changes(output_dir=str(tmp_path))
    whole = go(learning.with_changes(output_dir=None), teacher, tokenizer, data)
    with pytest.raises(StoppedError):
        go(learning, teacher, tokenizer, data, on_step=stop_at(step, "retain"))
    assert same(go(learning, teacher, tokenizer, data).student, whole.student)


def test_it_comes_before_the_other_stages(settings, teacher, tokenizer, data):
    settings = settings.with_changes(kept=3, retention="learned", retain_steps=1, block_tokens=64)
    result = go(settings, teacher, tokenizer, data)
    assert list(dict.fromkeys(record["stage"] for record in result.history)) == ["retain", "transfer", "distill"]
    weights = [p for name, p in result.student.named_parameters() if "retention_out" in name]
    assert all(p.any() for p in weights)


def test_what_is_usual_is_measured_on_texts_longer_than_a_forwards_rows_too(learning, teacher, tokenizer, data):
    """Every step reads one text of as many tokens as its four forwards have."""
    settings = learning.with_changes(block_tokens=16, rows=1, accumulation=4, length_factors=[4], retain_steps=1)
    assert len(go(settings, teacher, tokenizer, data).history) == 1


def test_texts_that_are_too_short_are_refused(learning, teacher, tokenizer, data):
    with pytest.raises(ArgumentError, match=r"`block_tokens` must give `retain` sequences of 28 tokens, got 16"):
        learning.with_changes(block_tokens=16, length_factors=[1])
    short = Data(ShortBlocks(), data[0].recall, recall_share=0.0, answer_weight=1.0, pad=0)
    with pytest.raises(ArgumentError, match=r"`block_tokens` must give `retain` texts of 28 tokens, got 'shorter"):
        go(learning, teacher, tokenizer, (short, data[1]))


def test_a_plan_counts_it(learning, teacher):
    found = plan(teacher.config, learning)
    assert [stage.stage for stage in found.stages] == ["retain"]


def test_without_anything_to_learn_it_is_refused():
    rule = r"`stages` must be without `retain`: keys are kept by what is learned only where there are any"
    for changes in ({}, {"kept": 2}):
        with pytest.raises(ArgumentError, match=rule):
            DistillationSettings(stages=["retain", "distill"], **changes)
    assert DistillationSettings(kept=2).stages == ["transfer", "distill"]
    with pytest.raises(ArgumentError, match=r"`retention` must be a known rule, got 'newest'.*: learned, redundancy"):
        DistillationSettings(kept=2, retention="newest")
    with pytest.raises(ArgumentError, match=r"`retain_lr` must be positive and finite, got 0.0"):
        DistillationSettings(retain_lr=0.0)


def test_a_students_folder_says_whether_there_is_something_to_learn(learning, teacher, tokenizer, data, tmp_path):
    own = {"window", "sinks", "mix", "kept", "retention"}
    given = {name: getattr(learning, name) for name in learning.given - own} | {
        "student": str(tmp_path),
        "stages": ["retain"],
    }
    learning.convert(copy.deepcopy(teacher)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = distill(DistillationSettings(**given), data=data)
    assert {record["stage"] for record in result.history} == {"retain"}
    patch_model(copy.deepcopy(teacher), window=4).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="`stages` must be without `retain`: keys are kept"):
        distill(DistillationSettings(**given), data=data)


def test_a_patched_model_that_has_learned_nothing_keeps_the_newest(teacher):
    student = patch_model(copy.deepcopy(teacher), window=4, kept=6, retention="learned", mix="window")
    longer = patch_model(copy.deepcopy(teacher), window=10, mix="window")
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(student(ids).logits, longer(ids).logits, atol=1e-5, rtol=1e-5)
