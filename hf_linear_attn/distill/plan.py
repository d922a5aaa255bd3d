"""What a distillation will need, on paper: memory by part and hours, from a model's config alone."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.distill.lora import projections
from hf_linear_attn.distill.settings import DistillationSettings, head_dim_of
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.loading import empty_model, position_limit

GIB = 2**30
H100_TFLOPS = 989.0
"""Dense bf16 peak of one H100 SXM."""


@dataclass(frozen=True)
class StagePlan:
    """One stage: memory per GPU by part in GiB, work, and time."""

    stage: str
    memory_gib: dict[str, float]
    trained_parameters: int
    exaflop: float
    hours: float

    @property
    def total_gib(self) -> float:
        """Memory per GPU."""
        return sum(self.memory_gib.values())


@dataclass(frozen=True)
class Plan:
    """What a run needs."""

    model: str
    parameters: int
    feature_map_parameters: int
    gpus: int
    stages: tuple[StagePlan, ...]

    def table(self) -> str:
        """Return the plan as a Markdown table."""
        parts = list(self.stages[0].memory_gib)
        lines = [
            f"{self.model}: {self.parameters / 1e9:.2f}B parameters, feature maps and mixing weights "
            f"{self.feature_map_parameters / 1e6:.1f}M, {self.gpus} GPUs",
            "",
            "| per GPU, GiB | " + " | ".join(stage.stage for stage in self.stages) + " |",
            "| --- " * (len(self.stages) + 1) + "|",
        ]
        for part in parts:
            lines.append(f"| {part} | " + " | ".join(f"{s.memory_gib[part]:.1f}" for s in self.stages) + " |")
        lines.append("| **total** | " + " | ".join(f"**{s.total_gib:.1f}**" for s in self.stages) + " |")
        trained = " | ".join(f"{s.trained_parameters / 1e6:,.1f}M" for s in self.stages)
        lines += [
            "| parameters trained | " + trained + " |",
            "| work, EFLOP | " + " | ".join(f"{s.exaflop:.1f}" for s in self.stages) + " |",
            "| hours | " + " | ".join(f"{s.hours:.2f}" for s in self.stages) + " |",
        ]
        return "\n".join(lines)


def plan(
    config: PreTrainedConfig,
    settings: DistillationSettings | None = None,
    *,
    tokens: float = 20e6,
    gpus: int = 8,
    tflops: float = H100_TFLOPS,
    utilisation: float = 0.4,
) -> Plan:
    """Compute memory and time of a run with everything sharded over the GPUs (FSDP2) and activations recomputed.

    Counted are: the teacher in bf16; the student's master weights in fp32, or in bf16 where LoRA freezes them; fp32
    gradients and two Adam moments per trained parameter; one layer gathered in bf16 on either side; per layer the
    bf16 input that recomputation starts from, and one layer's intermediates; and the logits (student and teacher, in
    bf16 and as fp32 log-probabilities, with their gradient). The allocator's slack is not counted. Work per token is
    2 FLOP per parameter for a forward and 4 for a backward, a recomputation being one more forward.

    Args:
        config: The softmax model's config.
        settings: The settings; ``rows`` and ``block_tokens`` decide the activations.
        tokens: Training tokens per stage.
        gpus: GPUs.
        tflops: A GPU's peak, in TFLOP/s.
        utilisation: Share of the peak that is reached, 0..1.

    Returns:
        The plan.

    Raises:
        ArgumentError: If a number is out of range, sequences are longer than the model's positions reach, or the config
            is not a causal language model's.

    Example:
        >>> from transformers import LlamaConfig
        >>> plan(LlamaConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=128)).gpus
        8
    """
    settings = settings or DistillationSettings(mixed_precision="bf16", gradient_checkpointing=True)
    for name, value in (("tokens", tokens), ("gpus", gpus), ("tflops", tflops), ("utilisation", utilisation)):
        if not value > 0 or (name == "utilisation" and value > 1):
            raise ArgumentError(name, "be positive, utilisation at most 1", value, "Correct it.")
    student = empty_model(config)
    settings = settings.within(position_limit(student))
    parameters = sum(p.numel() for p in student.parameters())
    text = config.get_text_config()
    head_dim = head_dim_of(config)
    with torch.device("meta"):
        student = settings.convert(student)
    parts = linear_attention_parts(student)
    maps = sum(p.numel() for part in parts for p in part.parameters())
    layers = text.num_hidden_layers
    embeddings = sum(p.numel() for name, p in student.named_parameters() if "embed" in name or "lm_head" in name)
    layer = (parameters - embeddings) / layers
    # A projection has one weight; its rows and columns are the sizes of the adapter's two halves.
    shapes = [next(module.parameters()).shape for module in projections(student).values()]
    adapters = settings.lora_rank * sum(rows + columns for rows, columns in shapes)
    stages = []
    for stage in settings.stages:
        if stage == "extend":
            width = settings.rows * settings.extend_factor * settings.block_tokens
        else:
            width = max(max(settings.rows, factor) for factor in settings.factors()) * settings.block_tokens
        lora = settings.trainable == "lora" and stage != "transfer"
        trained = maps if stage == "transfer" else adapters + maps * settings.train_feature_maps if lora else parameters
        if not lora and stage != "transfer":
            trained += maps * settings.train_feature_maps
        with_teacher = stage == "distill" and settings.distill_loss == "kl" and settings.teacher_logits is None
        weight_bytes = 2 if lora or stage == "transfer" else 4
        memory = {
            "teacher": 2 * parameters / gpus if with_teacher else 0.0,
            "student weights": weight_bytes * parameters / gpus + 4 * maps,
            "gradients": 4 * trained / gpus,
            "Adam moments": 8 * trained / gpus,
            "gathered layers": 2 * 2 * layer + 2 * embeddings,
            "activations": _activations(text, width, layers if stage != "transfer" else 1, maps / layers / head_dim),
            "logits": 0.0 if stage == "transfer" else width * text.vocab_size * (6 + 4 + (6 if with_teacher else 0)),
        }
        # Transfer runs a forward; the others forward, recomputation and backward, and the teacher's forward.
        passes = 2 if stage == "transfer" else 8 + 2 * with_teacher
        work = passes * parameters * tokens
        stages.append(
            StagePlan(
                stage=stage,
                memory_gib={name: value / GIB for name, value in memory.items()},
                trained_parameters=int(trained),
                exaflop=work / 1e18,
                hours=work / (gpus * tflops * 1e12 * utilisation) / 3600,
            )
        )
    name = getattr(config, "_name_or_path", "") or config.model_type
    return Plan(name, parameters, maps, gpus, tuple(stages))


def _activations(config: PreTrainedConfig, tokens: int, layers: int, features: float) -> float:
    """Return the bytes of the layers' inputs, and of one layer's intermediates, for ``tokens`` tokens in bf16."""
    hidden: int = config.hidden_size
    intermediate: int = getattr(config, "intermediate_size", None) or 4 * hidden
    # Norms, q, k, v, o and the residual twice: about 10 hidden; three of the MLP; features of q and k in fp32.
    one_layer = 2 * (10 * hidden + 3 * intermediate) + 4 * 2 * features
    return tokens * (2 * hidden * layers + one_layer)
