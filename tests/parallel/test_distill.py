"""What distillation does with parts of sequences."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig

from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.cli import plan as plan_command
from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, counted, next_tokens, weighted
from hf_linear_attn.distill.plan import GIB, plan
from hf_linear_attn.distill.stages.distill import next_token_loss
from hf_linear_attn.distill.teacher import LiveTeacher, SharedTeacher
from hf_linear_attn.distill.teacher_logits import TeacherLogits
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.parallel import context_parallel
from tests.distill.tiny import tiny_teacher
from tests.parallel.cases import RECOMMENDED, batch_of, model_of
from tests.parallel.threads import copies, on_ranks

LENGTHS = [11, 5, 24]


def some_batch(rows=2, tokens=40):
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(rows, tokens, generator=generator) * (torch.rand(rows, tokens, generator=generator) < 0.7)
    weights[:, 0] = 0
    ids = batch_of(rows, tokens)["input_ids"]
    return Batch(ids, weights, torch.ones(rows, tokens, dtype=torch.bool), numbers=tuple(range(rows)))


def parts_of(batch):
    starts = [sum(LENGTHS[:n]) for n in range(4)]
    return [batch.cut(a, b) for a, b in pairwise(starts)]


def test_parts_hold_every_next_token_once():
    batch = some_batch()
    hidden = torch.arange(80.0).view(2, 40, 1)
    whole = {(float(x), int(t), float(w)) for x, t, w in zip(weighted(batch, hidden), *next_tokens(batch), strict=True)}
    found = []
    for part in parts_of(batch):
        x = weighted(part, hidden[:, part.part.own])
        found += [(float(x), int(t), float(w)) for x, t, w in zip(x, *next_tokens(part), strict=True)]
    assert len(found) == len(whole) == len(counted(batch))
    assert set(found) == whole
    assert sum(part.weights.sum() for part in parts_of(batch)) == pytest.approx(float(batch.weights.sum()))


class Stored(TeacherLogits):
    """Logits that were never written."""

    def __init__(self):
        pass

    def row(self, number, batch):
        generator, count = torch.Generator().manual_seed(number), len(counted(batch))
        tokens = torch.randint(0, 259, (count, 4), generator=generator)
        return tokens, torch.rand(count, 4, generator=generator) - 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("kind", ["text", "live", "shared", "stored", "adapters"])
def test_losses_of_parts_add_up(kind):
    batch = some_batch()
    student = model_of(**RECOMMENDED)
    if kind == "adapters":
        student = get_peft_model(student, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    def teacher_of(student):
        if kind == "live":
            return LiveTeacher(tiny_teacher)
        if kind == "shared":
            return SharedTeacher(student)
        if kind == "stored":
            return Stored()
        return None

    def loss(student, batch):
        teacher = teacher_of(student)
        return next_token_loss(Predictor(student), batch, teacher, 0.0 if teacher is None else 0.5)

    expected = float(loss(student, batch).detach())
    students = copies(student, 3)

    def work(ranks):
        student = students[ranks.rank]
        with context_parallel(student, ranks) as context:
            part = loss(student, parts_of(batch)[ranks.rank])
            part.backward()
            return float(context.sum(part))

    for found in on_ranks(3, work):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "changes", "match"),
    [
        (None, {"stages": ["transfer"]}, "`context_parallel` must be 1 where no stage splits"),
        (None, {"softmax_budget": 0.5}, "`softmax_budget` must be 0 with context_parallel"),
        ("encoder", {}, "`context_parallel` must be 1 for an encoder"),
    ],
)
def test_settings_that_cannot_be_split_are_refused(preset, changes, match):
    make = DistillationSettings if preset is None else partial(DistillationSettings.from_preset, preset)
    with pytest.raises(ArgumentError, match=match):
        make(context_parallel=2, **changes)


class TestPlan:
    CONFIG = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**26,
    )

    def plan(self, ranks, block_tokens=16384, **more):
        settings = DistillationSettings(
            stages=["extend"], extend_factor=1, block_tokens=block_tokens, rows=1, context_parallel=ranks, shard=True
        )
        return plan(self.CONFIG, settings, gpus=4, **more)

    def test_activations_are_shared_out(self):
        one, four = (self.plan(ranks).stages[0].memory_gib for ranks in (1, 4))
        assert four["activations"] == pytest.approx(one["activations"] / 4, rel=0.1)
        assert four["handed-on states"] < 0.2 * four["activations"]
        assert four["Adam moments"] == one["Adam moments"]

    def test_what_fits_is_told_and_does(self):
        found = self.plan(4, gpu_memory=1.0)
        assert f"a sequence of {found.longest:,} tokens, split over 4 GPUs" in found.table()
        assert "MiB of states for a layer in a forward, at any length" in found.table()
        fits = self.plan(4, found.longest)
        assert fits.fits(1.0)
        assert fits.total_gib == pytest.approx(0.95, rel=0.02)
        assert fits.split.states_bytes == found.split.states_bytes
        held = fits.stages[0].memory_gib["activations"] * GIB
        assert held / fits.split.length == pytest.approx(
            self.plan(4).stages[0].memory_gib["activations"] * GIB / 16384, rel=0.1
        )

    def test_the_command_says_what_fits(self, tmp_path, capsys):
        self.CONFIG.save_pretrained(tmp_path)
        flags = "--stages extend --extend-factor 1 --block-tokens 16384 --rows 1 --gpus 4 --context-parallel 4 --shard"
        plan_command([str(tmp_path), *flags.split(), "--gpu-memory", "1"])
        assert "Expected to fit: a sequence of" in capsys.readouterr().out

    def test_gpus_that_do_not_fall_into_groups(self):
        with pytest.raises(ArgumentError, match="`gpus` must be a multiple of context_parallel, 3"):
            self.plan(3)

    def test_tokens_of_a_step_are_those_of_its_groups(self):
        one, four = (self.plan(ranks).stages[0].tokens for ranks in (1, 4))
        assert math.isclose(four, one / 4)
