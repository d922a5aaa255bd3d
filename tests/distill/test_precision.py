import pytest
import torch
from safetensors import safe_open

from hf_linear_attn import from_pretrained
from hf_linear_attn.distill import distill
from hf_linear_attn.errors import ArgumentError
from tests.distill.test_run import StoppedError, stop_at
from tests.distill.tiny import same, tiny_teacher
from tests.spread import spread

WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.05}


def halved(dtype=torch.bfloat16):
    """Return a teacher whose weights are bf16's numbers, in some dtype."""
    return tiny_teacher(**WIDE).to(torch.bfloat16).to(dtype)


def unchanged(student, teacher):
    before = teacher.state_dict()
    pairs = [(x, before[name]) for name, x in student.state_dict().items() if x.ndim == 2 and name in before]
    return sum((x == y.to(x.dtype)).sum().item() for x, y in pairs) / sum(x.numel() for x, _ in pairs)


def mean_loss(result, stage="distill"):
    losses = [record["loss_nats"] for record in result.history if record["stage"] == stage]
    return sum(losses) / len(losses)


@pytest.fixture
def forty(settings):
    changes = {"transfer_steps": 10, "distill_steps": 40, "distill_lr": None, "checkpoint_every": 100}
    return settings.with_changes(**changes)


# With adapters, losses are so small (0.02 nats) that bf16's rounding of logits is a larger part of them.
@pytest.mark.parametrize(("trainable", "tolerance"), [("full", 0.02), ("lora", 0.05)])
def test_a_bf16_checkpoint_trains_as_an_fp32_one_does(forty, tokenizer, data, tmp_path, trainable, tolerance):
    settings = forty.with_changes(trainable=trainable)
    plain = distill(settings, halved(torch.float32), tokenizer=tokenizer, data=data)
    teacher = halved()
    small = distill(settings.with_changes(output_dir=str(tmp_path)), teacher, tokenizer=tokenizer, data=data)
    for stage in ("transfer", "distill"):
        assert mean_loss(small, stage) == pytest.approx(mean_loss(plain, stage), rel=tolerance)
    if trainable == "full":
        assert unchanged(small.student, teacher) < 0.1
    assert {p.dtype for p in small.student.parameters()} == {torch.bfloat16}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert {x.dtype for x in tensors if x.is_floating_point()} == {torch.bfloat16}
    numbers = sum(p.numel() for p in small.student.parameters())
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * numbers + 10_000
    assert same(from_pretrained(tmp_path), small.student)


def test_without_mixed_precision_a_bf16_checkpoint_is_computed_with_in_fp32(settings, tokenizer, data):
    teacher, seen = halved(), []
    settings = settings.with_changes(mixed_precision="no", transfer_steps=1, distill_steps=2)
    plain = distill(settings, halved(torch.float32), tokenizer=tokenizer, data=data)
    small = distill(settings, teacher, tokenizer=tokenizer, data=data, on_step=seen.append)
    assert mean_loss(small, "transfer") == pytest.approx(mean_loss(plain, "transfer"), rel=1e-6)
    assert {p.dtype for p in small.student.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in teacher.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("optimizer", "master_weights"),
    spread([("adamw_8bit", "fp32"), ("adamw", "stochastic"), ("adamw_8bit", "compensated")], 3),
)
def test_lean_optimisers_train_nearly_alike_and_resume_to_the_same_bits(
    forty, tokenizer, data, tmp_path, optimizer, master_weights
):
    forty = forty.with_changes(transfer_steps=3, distill_steps=10)
    plain = distill(forty, halved(), tokenizer=tokenizer, data=data)
    settings = forty.with_changes(optimizer=optimizer, master_weights=master_weights, checkpoint_every=3)
    whole = distill(settings, halved(), tokenizer=tokenizer, data=data)
    assert mean_loss(whole) == pytest.approx(mean_loss(plain), rel=0.05)
    assert unchanged(whole.student, halved()) < 0.2
    settings = settings.with_changes(output_dir=str(tmp_path))
    with pytest.raises(StoppedError):
        distill(settings, halved(), tokenizer=tokenizer, data=data, on_step=stop_at(8))
    assert same(distill(settings, halved(), tokenizer=tokenizer, data=data).student, whole.student)


def test_an_optimiser_that_cannot_run_here_is_refused(settings, tokenizer, data):
    with pytest.raises(ArgumentError, match=r"`optimizer` must be `adamw` or `adamw_8bit` without bitsandbytes and a"):
        distill(settings.with_changes(optimizer="paged_adamw_8bit"), halved(), tokenizer=tokenizer, data=data)
    for name, value in (("optimizer", "adamw_8bit"), ("master_weights", "stochastic")):
        with pytest.raises(ArgumentError, match=f"`{name}` must be the default where weights are shar"):
            settings.with_changes(shard=True, **{name: value})
