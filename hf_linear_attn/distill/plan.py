"""What a distillation will need, on paper: memory by part and hours, from a model's config alone."""

import copy
import math
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import linear_attention_parts, map_parameters
from hf_linear_attn.distill.limits import QUANTISED
from hf_linear_attn.distill.models import shares_weights
from hf_linear_attn.distill.optimizer import moment_bytes
from hf_linear_attn.distill.planned import SLACK, Plan, Split, StagePlan
from hf_linear_attn.distill.precision import raise_precision, raise_trained, resolve
from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.distill.run import prepare_stage
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages import Stage
from hf_linear_attn.distill.teacher import Divergence, LiveTeacher, SharedTeacher, Teacher
from hf_linear_attn.distill.teacher_logits import TOP_K, stored_divergence
from hf_linear_attn.distill.trace import Device, Held, trace_step
from hf_linear_attn.encoders import is_encoder
from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.loading import empty_model, position_limit
from hf_linear_attn.parallel import bytes_sent

GIB = 2**30
H100_TFLOPS = 989.0
"""Dense bf16 peak of one H100 SXM."""

PROBE = 16384
"""Tokens of a rank at which it is found out what a token takes: so many that they outweigh a layer's weights."""

WEIGHT_BYTES = {"int8": 1.0, "int4": 1.0 + 4 / 32, "nf4": 0.5 + 4 / 64}
"""Bytes of a quantised weight, with its share of the scales."""


class StoredTeacher(Teacher):
    """As many logits as a folder of a teacher's would have."""

    @override
    def divergence(self, batch: Batch) -> Divergence:
        count = batch.input_ids[:, 1:].numel()
        tokens = torch.zeros(count, TOP_K, dtype=torch.int64)
        return stored_divergence(tokens, torch.zeros(count, TOP_K))


class Planner:
    """Count what the stages of a run hold.

    Raises:
        ArgumentError: If sequences are longer than the model's positions reach, or the config is not a causal language
            model's.
        UnsupportedError: If it is an encoder's, or the stages are.
    """

    def __init__(self, config: PreTrainedConfig, settings: DistillationSettings, device: Device = "cuda") -> None:
        self.config, self.device = config, device
        empty = empty_model(config)
        if settings.encoder or is_encoder(empty):
            remedy = "Distil an encoder without a plan: `hf-linear-attn distill --preset encoder`."
            raise UnsupportedError("model", "be a causal language model for a plan", type(empty).__name__, remedy)
        self.parameters = sum(p.numel() for p in empty.parameters())
        dtype = config.dtype or torch.float32
        if settings.model_dtype is not None:
            dtype = torch.bfloat16 if settings.model_dtype in QUANTISED else getattr(torch, settings.model_dtype)
        self.teacher = empty.to(dtype=dtype)  # type: ignore[call-arg]
        settings = settings.within(position_limit(empty))
        with torch.device("meta"):
            self.student: PreTrainedModel = settings.convert(copy.deepcopy(empty))
        self.settings = resolve(settings, self.student, "no")
        self.maps = sum(p.numel() for p in map_parameters(self.student))

    @cached_property
    def held(self) -> dict[str, tuple[Held, list[nn.Parameter]]]:
        """What each stage holds, and what it trains."""
        settings, found = self.settings, {}
        shared = shares_weights(settings)
        student: nn.Module = copy.deepcopy(self.student)
        if settings.mixed_precision == "no":
            raise_precision(student.parameters())
        loaded = False
        for name in settings.stages:
            kind: type[Stage] = stage_class(name)
            with torch.random.fork_rng(), torch.device("meta"):
                student = prepare_stage(settings, name, student)
            stage = kind(settings, student)
            raise_trained(settings, stage)
            models: dict[str, nn.Module] = {"student": student}
            loaded |= kind.needs_teacher(settings) and settings.teacher_logits is None and not shared
            if loaded:
                models["teacher"] = teacher = copy.deepcopy(self.teacher)
                if settings.teacher_dtype is not None and settings.teacher_dtype not in QUANTISED:
                    teacher.to(dtype=getattr(torch, settings.teacher_dtype))

            def make_stage(models: dict[str, nn.Module], kind: type[Stage] = kind) -> Stage:
                source: Teacher = LiveTeacher(lambda: models["teacher"])
                if settings.teacher_logits is not None:
                    source = StoredTeacher()
                elif shared:
                    source = SharedTeacher(models["student"])
                return kind(settings, models["student"], source)

            rows, length, forwards = self.largest(kind)
            traced = models
            if settings.shard and settings.mixed_precision == "bf16":
                # Gathered in bf16, layer by layer: autocast finds nothing to copy.
                traced = models | {"student": copy.deepcopy(student).to(torch.bfloat16)}
            held = trace_step(
                make_stage,
                traced,
                rows=rows,
                length=length,
                forwards=forwards,
                parts=settings.context_parallel if kind.splits else 1,
                sharded=settings.shard,
                autocast=settings.mixed_precision == "bf16",
                device=self.device,
            )
            if settings.shard:
                # Weights and gradients have the dtypes that they are kept in.
                weights = sum(x.numel() * x.element_size() for x in (*student.parameters(), *student.buffers()))
                gradients = sum(p.numel() * p.element_size() for p in stage.parameters)
                of_models = held.models | {"student": weights}
                held = held._replace(models=of_models, gradients=gradients, most=held.most + gradients)
            found[name] = (held, stage.parameters)
        return found

    def message(self) -> Split:
        """Return what ranks send for the largest forward of the stages that split sequences."""
        ranks, layers = self.settings.context_parallel, linear_attention_parts(self.student)
        sizes = [self.largest(kind) for kind in map(stage_class, self.settings.stages) if kind.splits]
        rows, length, _ = max(sizes, key=lambda size: (size[0], size[1]))
        half = 2 if self.settings.mixed_precision == "bf16" or self.student.dtype.itemsize == 2 else 4
        sent = [bytes_sent(layer, ranks, length, rows=rows, token_bytes=half) for layer in layers]
        return Split(ranks, length, max(x.states for x in sent), max(x.keys for x in sent), len(layers))

    def largest(self, kind: type[Stage]) -> tuple[int, int, int]:
        """Return rows, length and number of the largest forwards of a step."""
        settings = self.settings
        rows = settings.rows * settings.accumulation
        steps = [kind.sequences(settings, step, rows) for step in range(len(kind.lengths(settings)))]
        step = max(steps, key=lambda step: (step.at_once * step.length, step.length))
        return min(step.at_once, len(step.numbers)), step.length, math.ceil(len(step.numbers) / step.at_once)

    def saved_by_quantisation(self, dtype: str | None) -> float:
        """Return the bytes by which a model in bf16 shrinks."""
        if dtype is None or dtype not in WEIGHT_BYTES:
            return 0.0
        head = self.teacher.get_output_embeddings()  # type: ignore[no-untyped-call]
        linear = [m for m in self.teacher.modules() if isinstance(m, nn.Linear) and m is not head]
        return sum(m.weight.numel() for m in linear) * (2 - WEIGHT_BYTES[dtype])

    def memory(self, stage: str, gpus: int) -> dict[str, float]:
        """Return the bytes per GPU of a stage by part."""
        settings, (held, trained) = self.settings, self.held[stage]
        teacher_dtype = settings.teacher_dtype or settings.model_dtype
        teacher: float = held.models.get("teacher", 0)
        teacher -= self.saved_by_quantisation(teacher_dtype) if teacher else 0
        student = held.models["student"] - self.saved_by_quantisation(settings.model_dtype)
        moments = sum(moment_bytes(settings, p) for p in trained)
        # Optimisers of ours, and torch's on a CPU, go weight by weight and hold some copies of one; torch's on a GPU is
        # one kernel.
        lean = settings.optimizer != "adamw" or settings.master_weights != "fp32"
        copies = 5 if lean else 0 if self.device == "cuda" else 2
        most = max(held.most, held.gradients + copies * held.largest)
        sizes = (p.numel() * p.element_size() for p in self.teacher.parameters())
        # Sharded, two layers and what is in no layer are whole on either side.
        layers = self.config.get_text_config().num_hidden_layers
        embeddings = sum(m.weight.numel() for m in self.teacher.modules() if isinstance(m, nn.Embedding))
        gathered = 2 * (2 * (sum(sizes) / 2 - embeddings) / layers + embeddings) * (1 + bool(teacher))
        parts = gpus if settings.shard else 1
        handed = {}
        if settings.context_parallel > 1:
            # Every layer keeps a state for its backward; one at a time holds all ranks'.
            split = self.message()
            states = split.states_bytes / (split.ranks - 1) * (split.layers + split.ranks)
            handed = {"handed-on states": states if stage_class(stage).splits else 0.0}
        return handed | {
            "teacher": teacher / parts,
            "student weights": student / parts,
            "gradients": held.gradients / parts,
            "Adam moments": moments / parts,
            "gathered layers": 0.0 if parts == 1 else gathered,
            "activations": most - held.gradients,
        }

    def stage(self, stage: str, gpus: int, tokens: float | None, flops: float) -> StagePlan:
        """Return the plan of a stage."""
        settings, kind = self.settings, stage_class(stage)
        _, trained = self.held[stage]
        if tokens is None:
            step = kind.sequences(settings, 0, settings.rows * settings.accumulation)
            tokens = float(kind.steps(settings) * len(step.numbers) * step.length * gpus / settings.context_parallel)
        passes = 2
        if kind.recomputes:
            # Frozen weights need no gradient, only what is before them.
            passes += 2 if settings.trainable == "lora" else 4
            passes += 2 * settings.gradient_checkpointing
        passes += 2 * (kind.needs_teacher(settings) and settings.teacher_logits is None)
        work = passes * self.parameters * tokens
        return StagePlan(
            stage=stage,
            memory_gib={name: value / GIB for name, value in self.memory(stage, gpus).items()},
            trained_parameters=sum(p.numel() for p in trained),
            tokens=tokens,
            exaflop=work / 1e18,
            hours=work / (gpus * flops) / 3600,
        )

    def plan(self, gpus: int, tokens: float | None, flops: float) -> Plan:
        """Return the plan of the run."""
        stages = tuple(self.stage(stage, gpus, tokens, flops) for stage in self.settings.stages)
        name = getattr(self.config, "_name_or_path", "") or self.config.model_type
        split = None if self.settings.context_parallel == 1 else self.message()
        return Plan(name, self.parameters, self.maps, gpus, self.settings.shard, stages, split)

    def longest(self, gpus: int, gpu_memory: float) -> int:
        """Return how many tokens a sequence may have that all ranks split among them.

        What a stage holds grows in proportion to the tokens: two lengths tell how much a token takes. Rounded down to
        whole thousands; 0 where the model alone does not fit.
        """
        budget, found = SLACK * gpu_memory * GIB, []
        each = PROBE * self.settings.context_parallel
        shorter, longer = (
            Planner(self.config, self.settings.with_changes(block_tokens=n * each), self.device) for n in (1, 2)
        )
        for name in self.settings.stages:
            kind = stage_class(name)
            if not kind.splits:
                continue
            _, length, _ = shorter.largest(kind)
            less, more = (sum(planner.memory(name, gpus).values()) for planner in (shorter, longer))
            of_token = (more - less) / length
            found.append(max(0.0, length + (budget - less) / of_token))
        return int(min(found)) // 1000 * 1000


def plan(
    config: PreTrainedConfig,
    settings: DistillationSettings | None = None,
    *,
    tokens: float | None = None,
    gpus: int = 1,
    tflops: float = H100_TFLOPS,
    utilisation: float = 0.4,
    device: Device = "cuda",
    gpu_memory: float | None = None,
) -> Plan:
    """Compute memory and time of a run from a model's config, and from the settings that :func:`distill` takes.

    Memory is counted by running a step of each stage without numbers, see :mod:`hf_linear_attn.distill.trace`: weights,
    gradients, the optimiser's moments, and the most that a forward and backward hold at once. What a GPU's allocator
    wastes is not counted. Work per token is 2 FLOP per parameter for a forward, 4 for a backward (2 where weights are
    frozen), and 2 each for a recomputation and for the teacher.

    Numbers are as in :class:`hf_linear_attn.distill.cli.PlanSettings`; with ``gpu_memory``, the plan says how long
    sequences may be that are split over several GPUs.

    Raises:
        ArgumentError: If a number is out of range, sequences are longer than the model's positions reach, or the config
            is not a causal language model's.

    Example:
        >>> from transformers import LlamaConfig
        >>> small = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, intermediate_size=128)
        >>> plan(small, DistillationSettings(block_tokens=16, window=4), gpus=1).gpus
        1
    """
    settings = settings or DistillationSettings()
    check_machine(tokens, gpus, tflops, utilisation)
    if gpus % (ranks := settings.context_parallel):
        rule = f"be a multiple of context_parallel, {ranks}"
        raise ArgumentError("gpus", rule, gpus, "Each sequence is split over as many.")
    planner = Planner(config, settings, device)
    found = planner.plan(gpus, tokens, tflops * 1e12 * utilisation)
    if gpu_memory is None or found.split is None:
        return found
    return replace(found, longest=planner.longest(gpus, gpu_memory))


def check_machine(
    tokens: float | None, gpus: float, tflops: float, utilisation: float, gpu_memory: float | None = None
) -> None:
    """Refuse numbers out of range."""
    numbers = {"tokens": tokens, "gpus": gpus, "tflops": tflops, "utilisation": utilisation, "gpu_memory": gpu_memory}
    for name, value in numbers.items():
        if value is not None and (not value > 0 or (name == "utilisation" and value > 1)):
            rule = {"gpus": "be at least 1", "utilisation": "be above 0 and at most 1"}.get(name, "be positive")
            raise ArgumentError(name, rule, value, "Leave it out for the default.")
