"""Settings of a distillation run: one dataclass for flags, YAML, JSON and Python."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from transformers import PreTrainedModel

from hf_linear_attn.arguments import Setting, read_settings_file, settings_of
from hf_linear_attn.checks import check_types
from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.distill.limits import check_limits, conversion_value
from hf_linear_attn.distill.presets import CONVERSION, over_preset
from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.loading import head_dim_of
from hf_linear_attn.patching import patch_model

Dtype = Literal["float32", "bfloat16", "float16", "int8", "int4", "nf4"]

REFERENCE_WIDTH = 4096
"""Hidden size at which :data:`REFERENCE_LR` is right."""

REFERENCE_LR = 5e-5
"""Adam's learning rate of the attention modules at :data:`REFERENCE_WIDTH`."""

REFERENCE_HEAD_DIM = 128
"""Head dim at which :data:`REFERENCE_MAP_LR` is right."""

REFERENCE_MAP_LR = 1e-2
"""Adam's learning rate of feature maps and mixing weights at :data:`REFERENCE_HEAD_DIM` (LoLCATs, arXiv:2410.10254)."""

LENGTH_FACTORS = (1, 2, 4)
"""Lengths of sequences, as multiples of the shortest ones."""

RECOMMENDED = LinearAttentionConfig(feature_map="norm_preserving", window=64, sinks=4, rotary="auto")
"""How a model is converted that is going to be trained.

``patch_model``'s own defaults are for a model that is not trained: its ``elu`` has no parameters. What the study
chose, docs/results/distillation.md, is worthless before training and best after it.
"""


@dataclass(frozen=True, init=False)
class DistillationSettings:
    """Say what is distilled, from what, on which data, and how.

    The defaults are the preset ``recommended``; with a ``student``, how it is converted is read off it. The settings of
    the conversion, from ``feature_map`` to ``allow_approximate``, are given and read by their own names beside the
    others: ``DistillationSettings(window=16)``.

    Args:
        model: The softmax checkpoint, a folder or hub name; None where the models are passed in memory.
        student: A patched model to go on from, converted as it is, whatever a preset says of conversion; None to patch
            a copy of ``model``.
        teacher_logits: Folder with the teacher's precomputed logits, made by ``hf-linear-attn teacher-logits``; None to
            run the teacher.
        model_dtype: Dtype in which ``model`` is loaded, for the student and the teacher: ``float32``, ``bfloat16`` or
            ``float16``; or, where adapters are trained, a quantisation of its linear layers but the head: ``int8`` and
            ``int4`` (torchao; a weight of int4 takes 8 bits of memory there) or ``nf4`` (bitsandbytes, 4 bits). None
            for the checkpoint's own.
        teacher_dtype: The same for the teacher alone; None for that of the student.
        output_dir: Where checkpoints, log and the student go; None keeps everything in memory.
        overwrite: Start anew in an output folder that holds an earlier run, or files of others; those stay, but for
            files of the same names.
        conversion: How attention is converted; where an option of the feature map is the word ``head_dim``, it stands
            for the model's.
        feature_map_file: Python file that registers feature maps of your own, so that ``feature_map`` can name one.
        softmax_budget: Share of the converted layers that is turned back to softmax before training, chosen by
            measurement, 0..1.
        softmax_by: How they are chosen: ``kl``, by how much restoring a layer lowers the KL from the teacher;
            ``recall``, by how much more converting it costs answers about what stands far back than it costs text.
        divide: How window and kept keys are divided among layers: ``evenly``, each having as many as the settings say;
            or by ``kl``: as many in all, but more of them to layers that need them, by the KL from the teacher with one
            layer at a time converted.
        stages: Stages in the order they run, ``retain``, ``transfer``, ``distill``, ``extend``, or some of them; only
            where ``retention`` is ``learned`` is there something for ``retain``, and a window alone has nothing to
            transfer. Of an encoder ``transfer``, ``embed``.
        dataset: Hub name, or path of a file or folder of them, compressed or not; several are mixed. None for the
            source text of Python's standard library.
        dataset_weights: How much is read of each dataset, as these numbers are to each other; None for as much of each.
        dataset_config: Configuration of a hub dataset; one for all, or one for each.
        dataset_split: Split of a hub dataset; one for all, or one for each.
        columns: What columns of a dataset stand for, where their names do not tell, as in ``text=body`` or
            ``prompt=question completion=answer``.
        chat_template: File with the Jinja template that makes texts of conversations; None for the tokenizer's.
        loss_on: What is learned of conversations and completions: ``answers``, or ``all`` of the text.
        streaming: Read the datasets as they are needed instead of downloading them whole.
        block_tokens: Length T of the shortest training sequences.
        length_factors: Lengths of the sequences of ``transfer`` and ``distill`` as multiples of ``block_tokens``, taken
            in turn, step by step; divisors of ``rows * accumulation``, since every step reads as many tokens and longer
            sequences are fewer. None for those of 1, 2, 4 that divide ``rows``, so that no forward is larger, and that
            the model has positions for, where these run out. Feature maps see rotated queries and keys, and serve badly
            at positions that they were not trained on.
        pack: Whether documents that do not fill a sequence share one, each seeing itself alone; otherwise they are
            padded.
        recall_share: Share of the sequences that are generated recall tasks, 0..1: on local text alone, a window looks
            perfect and the linear branch learns nothing.
        recall_text: Share of these recall tasks that are set into text of the training data, 0..1; the others stand in
            noise. What is rehearsed in noise alone is not found in text.
        recall_text_from: Share of the run's steps, 0..1, up to which all of them stand in noise.
        answer_weight: Weight of an answer token's loss in a recall sequence, where a text token's is 1; less where a
            sequence has so many answers that it would outweigh one of text.
        rows: Sequences of ``block_tokens`` per process and forward, B.
        accumulation: Forwards per optimiser step.
        calibration_batches: Batches of ``rows``, of 2048 tokens at most, from which the gates of an update rule start,
            without training: see :func:`hf_linear_attn.distill.calibrate.calibrate`. 0 starts them alike.
        retain_steps: Steps in which it is learned what to keep, where ``retention`` is ``learned``.
        retain_lr: Its learning rate.
        transfer_steps: Steps of attention transfer.
        transfer_loss: ``output``: squared error of the heads' outputs over the softmax outputs' variance; ``weights``:
            cross-entropy of the linear attention weights against softmax's (quadratic in T).
        map_lr: Learning rate of feature maps and mixing weights, in every stage; None for ``1e-2 * 128 / head_dim``,
            since so many numbers add up in each of their outputs.
        distill_steps: Steps of logit distillation.
        distill_lr: Learning rate of the attention modules; None for ``5e-5 * 4096 / hidden_size``, since Adam's best
            rate goes as one over the width (Yang et al., 2022, arXiv:2203.03466).
        lr_factor: Factor on that default; more where attention is to be learned anew.
        rest_lr_share: Learning rate of all other parameters, as a share of the attention modules'; 0 freezes them.
        distill_loss: ``kl``: Kullback-Leibler divergence from the teacher's full distribution; ``ce``: cross-entropy
            of the text.
        ce_share: Share of cross-entropy in a ``kl`` loss, 0..1.
        embedding_share: Share of the embeddings' cosine in the loss of ``embed``, 0..1; the rest is the error of every
            layer's hidden states.
        pooling: How an encoder's embedding is made of its tokens: ``mean``, ``cls``, ``max``, ``lasttoken``,
            ``weightedmean``, ``mean_sqrt_len_tokens``, or some joined by ``+``. None for what the model's folder says,
            if sentence-transformers wrote it, else the mean.
        teacher_share: Share of the teacher's own weights in those that are saved, 0..1: when training has ended, all
            that both models have are moved so far back (Wortsman et al., 2022, arXiv:2109.01903), by which more of the
            near past comes back than is lost of what was learned. Adapters add that much less.
        window_dropout: Probability, at the start of ``distill``, with which a layer sees only its linear branch in a
            step; falls linearly to 0 at the end.
        trainable: ``full``, or ``lora``: adapters on the attention projections.
        train_feature_maps: Whether feature maps and mixing weights go on learning after ``transfer``.
        lora_rank: Rank of the adapters.
        lora_alpha: Their scale times the rank.
        merge_lora: Whether the student is saved with its adapters merged; otherwise as a PEFT folder.
        extend_steps: Steps of cross-entropy at ``extend_factor * block_tokens``.
        extend_lr: Its learning rate; None for a tenth of ``distill_lr``.
        extend_factor: How much longer its sequences are.
        warmup_share: Share of a stage in which the learning rate rises; it then falls linearly to 0.
        weight_decay: AdamW's.
        betas: AdamW's.
        max_grad_norm: Norm to which the gradient is clipped; 0 leaves it as it is.
        shard: Shard student and teacher over the processes with torch's ``fully_shard``; needs several processes.
        context_parallel: Processes among which each sequence of ``distill`` and ``extend`` is split; a divisor of the
            number of processes. Sequences of ``transfer`` stay whole, and all processes share them.
        gradient_checkpointing: Recompute activations in the backward pass.
        mixed_precision: ``bf16`` computes forwards in bf16, ``no`` in fp32; ``auto`` is ``bf16`` for a checkpoint of 16
            bits and ``no`` for others. Whichever it is, weights that are trained are kept in fp32, and saved in the
            checkpoint's dtype.
        optimizer: ``adamw``; ``adamw_8bit`` keeps its moments in 8 bits, ``paged_adamw_8bit`` bitsandbytes' in memory
            that moves to the host where the GPU's runs out.
        master_weights: ``fp32``; or, where memory is short, the checkpoint's own bf16 for all but feature maps and
            adapters, rounded at random in ``stochastic``, with a second bf16 number for what is rounded off in
            ``compensated``.
        seed: Of everything random.
        heldout_rows: Sequences on which teacher and student are measured; 0 for none.
        heldout_answers: Questions per task and length, up to 8 times ``block_tokens``, that both answer in writing
            besides; 0 for none. Only where ``heldout_rows`` is above 0.
        log_every: Steps between two log lines.
        checkpoint_every: Steps between two checkpoints.
        keep_checkpoints: Number of checkpoints kept, >= 2, so that a damaged one can be passed over.
        trackers: Accelerate's trackers, such as ``tensorboard``.
        progress: Show a progress bar.

    Raises:
        ArgumentError: If a value is out of range.

    Example:
        >>> DistillationSettings(window=16).mix
        'key'
        >>> DistillationSettings.from_preset("lolcats", window=32).trainable
        'lora'
    """

    model: str | None = None
    student: str | None = None
    teacher_logits: str | None = None
    model_dtype: Dtype | None = None
    teacher_dtype: Dtype | None = None
    output_dir: str | None = None
    overwrite: bool = False
    conversion: LinearAttentionConfig = RECOMMENDED
    feature_map_file: str | None = None
    softmax_budget: float = 0.0
    softmax_by: Literal["kl", "recall"] = "kl"
    divide: Literal["evenly", "kl"] = "evenly"
    stages: list[str] = field(default_factory=lambda: ["retain", "transfer", "distill"])
    dataset: list[str] | None = None
    dataset_weights: list[float] | None = None
    dataset_config: list[str] | None = None
    dataset_split: list[str] = field(default_factory=lambda: ["train"])
    columns: list[str] = field(default_factory=list)
    chat_template: str | None = None
    loss_on: Literal["answers", "all"] = "answers"
    streaming: bool = False
    block_tokens: int = 512
    length_factors: list[int] | None = None
    pack: bool = True
    recall_share: float = 0.3
    recall_text: float = 0.0
    recall_text_from: float = 0.0
    answer_weight: float = 2.0
    rows: int = 4
    accumulation: int = 1
    calibration_batches: int = 0
    retain_steps: int = 300
    retain_lr: float = 3e-3
    transfer_steps: int = 100
    map_lr: float | None = None
    transfer_loss: Literal["output", "weights"] = "output"
    distill_steps: int = 600
    distill_lr: float | None = None
    lr_factor: float = 1.0
    teacher_share: float = 0.0
    rest_lr_share: float = 0.3
    distill_loss: Literal["kl", "ce"] = "kl"
    ce_share: float = 0.0
    embedding_share: float = 0.1
    pooling: str | None = None
    window_dropout: float = 0.0
    trainable: Literal["full", "lora"] = "full"
    train_feature_maps: bool = True
    lora_rank: int = 8
    lora_alpha: float = 16.0
    merge_lora: bool = True
    extend_steps: int = 100
    extend_lr: float | None = None
    extend_factor: int = 4
    warmup_share: float = 0.05
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0
    shard: bool = False
    context_parallel: int = 1
    gradient_checkpointing: bool = False
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    master_weights: Literal["fp32", "stochastic", "compensated"] = "fp32"
    seed: int = 0
    heldout_rows: int = 32
    heldout_answers: int = 8
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    trackers: list[str] = field(default_factory=list)
    progress: bool = True

    def __init__(self, **given: Any) -> None:
        own = {f.name: f for f in fields(self)}
        if unknown := sorted(given.keys() - own.keys() - set(CONVERSION)):
            raise ArgumentError(
                "settings", "be known", unknown, "Remove those", available=[one.name for one in declared_settings()]
            )
        of_conversion = {name: conversion_value(name, given[name]) for name in CONVERSION if name in given}
        if of_conversion.get("window", 0) is None:
            # Sinks are beside a window; where there is none, their default gives way.
            of_conversion = {"sinks": 0} | of_conversion
        values: dict[str, Any] = {
            name: setting.default if setting.default_factory is MISSING else setting.default_factory()
            for name, setting in own.items()
        }
        values |= {name: value for name, value in given.items() if name in own}
        for name in ("dataset", "dataset_config", "dataset_split", "columns"):
            if isinstance(values[name], str):
                values[name] = [values[name]]
        values["conversion"] = replace(values["conversion"], **of_conversion)
        # A default may give way where an explicit setting may not.
        names = frozenset(given) - {"conversion"} | (frozenset(CONVERSION) if "conversion" in given else frozenset())
        for name, value in (values | {"_given": names}).items():
            object.__setattr__(self, name, value)
        check_types(self)
        for name, value in check_limits(self).items():
            object.__setattr__(self, name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in CONVERSION:
                return getattr(self.conversion, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def encoder(self) -> bool:
        """Whether an encoder is distilled, by its hidden states, in place of a language model."""
        return any(stage_class(stage).encoder for stage in self.stages)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """Return the settings of a preset with some of them changed.

        Raises:
            ArgumentError: If there is no such preset.
        """
        return cls(**over_preset(name, changes))

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> Self:
        """Read settings from a YAML or JSON file; ``preset`` in it names a preset to start from.

        Raises:
            ArgumentError: If the file cannot be read, or holds unknown settings.
        """
        values = read_settings_file(path, [*declared_settings(), Setting("preset", str)])
        return cls(**over_preset(values.pop("preset", "recommended"), values | changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by their names, the conversion's among them, as plain JSON values."""
        values = asdict(self)
        del values["conversion"]
        return conversion_values(self.conversion) | values

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with some settings changed."""
        values = self.to_dict()
        return type(self)(**({name: values[name] for name in self.given} | changes))

    @property
    def given(self) -> frozenset[str]:
        """Names of the settings that were given; the others are defaults."""
        return frozenset(vars(self)["_given"])

    def factors(self) -> list[int]:
        """Return the lengths of sequences as multiples of ``block_tokens``."""
        if self.length_factors is not None:
            return self.length_factors
        return [factor for factor in LENGTH_FACTORS if not self.rows % factor]

    def within(self, positions: int | None) -> Self:
        """Return the settings for a model of so many positions, without the default lengths that reach beyond.

        Raises:
            ArgumentError: If a length that was asked for reaches beyond them.
        """
        if positions is None:
            return self
        rule = f"keep sequences within the model's {positions} positions"
        if self.block_tokens > positions:
            raise ArgumentError("block_tokens", rule, self.block_tokens, "Lower it.")
        remedy = f"Lower it, or `block_tokens`, which is {self.block_tokens}."
        for stage in map(stage_class, self.stages):
            setting = stage.length_setting
            by_default = setting == "length_factors" and self.length_factors is None
            if max(stage.lengths(self)) > positions and not by_default:
                raise ArgumentError(setting, rule, getattr(self, setting), remedy)
        if self.length_factors is not None:
            return self
        factors = [factor for factor in self.factors() if factor * self.block_tokens <= positions]
        return self if factors == self.factors() else self.with_changes(length_factors=factors)

    def trained_length(self) -> int:
        """Return the tokens of the longest sequences that a run trains on."""
        longest: int = max(length for stage in self.stages for length in stage_class(stage).lengths(self))
        return longest

    def learning_rate(self, hidden_size: int) -> float:
        """Return the attention modules' learning rate for a model of that width."""
        return self.distill_lr or self.lr_factor * REFERENCE_LR * REFERENCE_WIDTH / hidden_size

    def map_learning_rate(self, head_dim: int) -> float:
        """Return the learning rate of feature maps and mixing weights for that head dim."""
        return self.map_lr or REFERENCE_MAP_LR * REFERENCE_HEAD_DIM / head_dim

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        """Patch a softmax model in place, as :func:`patch_model` does."""
        conversion = self.conversion_for(head_dim_of(model.config))
        return patch_model(model, **{name: getattr(conversion, name) for name in CONVERSION})

    def conversion_for(self, head_dim: int) -> LinearAttentionConfig:
        """Return the conversion of a model of that head dim."""
        options = self.conversion.feature_map_options
        known = {name: head_dim if value == "head_dim" else value for name, value in options.items()}
        return replace(self.conversion, feature_map_options=known)


def conversion_values(conversion: LinearAttentionConfig) -> dict[str, Any]:
    """Return the settings of a conversion as plain JSON values: all, where its ``to_dict`` leaves out later ones."""
    return dict(json.loads(json.dumps({name: getattr(conversion, name) for name in CONVERSION})))


def declared_settings(defaults: Mapping[str, Any] | None = None) -> list[Setting]:
    """Return all settings, the conversion's in its place, with ``defaults`` shown in place of their own."""
    shown = {**RECOMMENDED.to_dict(), **(defaults or {})}
    of_conversion = [setting for setting in settings_of(LinearAttentionConfig, shown) if setting.name in CONVERSION]
    found: list[Setting] = []
    for setting in settings_of(DistillationSettings, defaults):
        found += of_conversion if setting.name == "conversion" else [setting]
    return found
