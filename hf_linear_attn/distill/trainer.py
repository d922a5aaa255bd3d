"""The training loop: one for all stages, on Accelerate."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm.auto import tqdm

from hf_linear_attn.distill.checkpoint import Checkpoint, checkpoints, load_newest, save_checkpoint, settings_then
from hf_linear_attn.distill.data import Batch, Data
from hf_linear_attn.distill.forward import map_parameters, model_inputs
from hf_linear_attn.distill.optimizer import make_optimizer
from hf_linear_attn.distill.precision import raise_trained
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.sharding import (
    average_gradients,
    clip_gradients,
    distributed_like,
    full_optimizer_state,
    full_tensors,
    reshard,
)
from hf_linear_attn.distill.stages import Stage, stage_class
from hf_linear_attn.distill.teacher import Teacher
from hf_linear_attn.errors import ArgumentError, CheckpointError, TrainingError
from hf_linear_attn.files import named_in_errors, write_atomic
from hf_linear_attn.parallel import ContextParallel, context_parallel

logger = logging.getLogger(__name__)

OnStep = Callable[[dict[str, Any]], None]

FREE_TO_CHANGE = frozenset(
    {
        "output_dir", "overwrite", "feature_map_file", "progress", "trackers", "log_every", "checkpoint_every",
        "keep_checkpoints", "rows", "accumulation", "heldout_rows", "heldout_answers", "gradient_checkpointing",
        "shard", "context_parallel",
    }
)  # fmt: skip
"""Settings that a resumed run may change: the weights do not depend on them, as long as a step has as many rows."""


class Trainer:
    """Run stages over one student, resuming where an earlier run stopped.

    The student is on the accelerator's device; there is no teacher where no stage needs it. ``on_step`` is called with
    every log record, on the main process.
    """

    def __init__(
        self,
        settings: DistillationSettings,
        student: nn.Module,
        data: Data,
        teacher: Teacher | None,
        accelerator: Accelerator,
        on_step: OnStep | None = None,
    ) -> None:
        self.settings, self.student, self.data = settings, student, data
        self.teacher, self.accelerator = teacher, accelerator
        self.on_step = on_step
        self.folder = None if settings.output_dir is None else Path(settings.output_dir)
        self.log = self.folder / "log.jsonl" if self.folder is not None and accelerator.is_main_process else None
        self.rows_per_step = settings.rows * settings.accumulation * readers(settings, accelerator)
        self.context: ContextParallel | None = None
        self.history: list[dict[str, Any]] = []
        self.trained: set[str] = set()
        self.tokens = 0
        self.elapsed_s = 0.0

    def run(self, before_stage: Callable[[str, nn.Module], nn.Module]) -> None:
        """Run all stages; before each, ``before_stage`` returns the student to train, which LoRA may wrap.

        Raises:
            ArgumentError: If an earlier run in the folder had other settings.
            CheckpointError: If checkpoints cannot be read or written.
            TrainingError: If the loss is not finite.
        """
        resumed = self._resume()
        done = 0
        for name in self.settings.stages:
            self.student = before_stage(name, self.student)
            reshard(self.student)
            stage: Stage = stage_class(name)(self.settings, self.student, self.teacher)
            steps = stage.steps(self.settings)
            raise_trained(self.settings, stage)
            self._remember_trained()
            if resumed is None or resumed.meta["stage"] == name:
                with self._split(stage) as self.context:
                    self._run_stage(stage, steps, done, resumed)
                resumed = None
            done += steps

    def _split(self, stage: Stage) -> AbstractContextManager[ContextParallel | None]:
        """Return a context in which the student reads parts of sequences, where the stage's are split."""
        size = self.settings.context_parallel
        if size == 1 or not stage.splits:
            return nullcontext()
        shape = (self.accelerator.num_processes // size, size)
        mesh = init_device_mesh(self.accelerator.device.type, shape, mesh_dim_names=("dp", "cp"))
        return context_parallel(self.student, mesh["cp"])

    def _run_stage(self, stage: Stage, steps: int, done: int, resumed: Checkpoint | None) -> None:
        settings, accelerator = self.settings, self.accelerator
        optimizer = make_optimizer(settings, stage.groups)
        peaks = [group["lr"] for group in optimizer.param_groups]
        first = 0
        if resumed is not None:
            first = resumed.meta["step"]
            self._load_student(resumed.tensors)
            self._load_optimizer(optimizer, resumed.optimizer)
            self.history, self.tokens, self.elapsed_s = (resumed.meta[k] for k in ("history", "tokens", "elapsed_s"))
        prepared = accelerator.prepare_optimizer(optimizer)
        started = time.perf_counter() - self.elapsed_s
        since = time.perf_counter(), self.tokens
        self.student.train()
        shown = settings.progress and accelerator.is_main_process
        bar = tqdm(total=steps, initial=first, desc=stage.name, unit="step", disable=not shown)
        if self.log is not None:
            # What was logged after the checkpoint that the run goes on from is logged anew.
            write_atomic(self.log, "".join(json.dumps(record) + "\n" for record in self.history))
        with bar:
            for step in range(first, steps):
                share = lr_share(step, steps, settings.warmup_share)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * share
                # Dropout inside the model depends on the step and the process alone, so a resumed run repeats it.
                torch.manual_seed(hash((settings.seed, done + step, accelerator.process_index)))
                loss, norm = self._step(stage, step, done, prepared)
                last, now = step + 1 == steps, time.perf_counter()
                self.elapsed_s = now - started
                if (step + 1) % settings.log_every == 0 or last:
                    rate = (self.tokens - since[1]) / max(now - since[0], 1e-9)
                    since = now, self.tokens
                    record = {
                        "stage": stage.name,
                        "step": step + 1,
                        "loss_nats": loss,
                        "gradient_norm": norm,
                        "lr": peaks[0] * share,
                        "tokens": self.tokens,
                        "tokens_per_s": rate,
                        "elapsed_s": self.elapsed_s,
                        "peak_mib": peak_mib(accelerator.device),
                    }
                    bar.set_postfix(loss=f"{loss:.4f}", tokens_per_s=f"{rate:.0f}")
                    self._report(record, done)
                bar.update()
                if self.folder is not None and ((step + 1) % settings.checkpoint_every == 0 or last):
                    self._save(stage, step + 1, done, optimizer)
        stage.end()

    def _report(self, record: dict[str, Any], done: int) -> None:
        """Put a log record wherever it is read."""
        self.history.append(record)
        if self.log is not None:
            with named_in_errors(self.log), self.log.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if self.settings.trackers:
            values = {f"{record['stage']}/{k}": v for k, v in record.items() if isinstance(v, (int, float))}
            self.accelerator.log(values, step=done + record["step"])
        if self.on_step is not None and self.accelerator.is_main_process:
            self.on_step(record)

    def _step(self, stage: Stage, step: int, done: int, optimizer: Any) -> tuple[float, float]:
        """Take one optimiser step; return the mean loss over all processes and the gradient's norm."""
        settings, accelerator = self.settings, self.accelerator
        stage.begin_step(step)
        chosen = stage.sequences(settings, done + step, self.rows_per_step)
        # Processes that split sequences among them read the same ones.
        together = 1 if self.context is None else self.context.size
        share = len(chosen.numbers) * together // accelerator.num_processes
        first = chosen.numbers[accelerator.process_index // together * share]
        batches = []
        for start in range(first, first + share, chosen.at_once):
            numbers = range(start, min(start + chosen.at_once, first + share))
            batch = self.data.batch(numbers, chosen.length).to(accelerator.device)
            if self.context is not None:
                lengths = self.context.lengths(chosen.length)
                start = sum(lengths[: self.context.rank])
                batch = batch.cut(start, start + lengths[self.context.rank])
            batches.append(batch)
        self.tokens += len(chosen.numbers) * chosen.length
        weight = torch.stack([stage.weight(batch) for batch in batches]).sum().to(accelerator.device)
        # Gradients are averaged over processes, so each contributes its share of the sum over all of them.
        total = accelerator.reduce(weight.float(), "sum")
        scale = accelerator.num_processes / total
        losses = torch.zeros((), device=accelerator.device)

        def learn(part: Tensor) -> None:
            with torch.autocast(accelerator.device.type, enabled=False):
                accelerator.backward(part * scale)

        stage.learn = learn
        for batch in batches:
            with torch.autocast(accelerator.device.type, torch.bfloat16, settings.mixed_precision == "bf16"):
                part = stage.loss(batch)
            if part.requires_grad:
                learn(part)
            losses += part.detach()
            # Its graph would hold tensors while the next batch is read.
            del part
        loss = (accelerator.reduce(losses, "sum") / total).item()
        if not math.isfinite(loss):
            raise self._not_finite(stage, step, loss, batches[0])
        average_gradients(stage.parameters, accelerator.num_processes)
        norm = clip_gradients(stage.parameters, settings.max_grad_norm)
        if not math.isfinite(norm):
            raise self._not_finite(stage, step, norm, batches[0])
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    def _not_finite(self, stage: Stage, step: int, value: float, batch: Batch) -> TrainingError:
        layer = stage.suspect() or first_not_finite(self.student, batch)
        last = None if self.folder is None else next(reversed(checkpoints(self.folder / "checkpoints")), None)
        rule = f"be finite, and at step {step + 1} of {stage.name} loss or gradient is not"
        remedy = f"Lower the learning rate; last good checkpoint: {last}."
        return TrainingError("loss", rule, value, remedy, where=layer)

    def _remember_trained(self) -> None:
        # Feature maps belong to every checkpoint: LoRA renames them, and may freeze them after `transfer`.
        maps = map_parameters(self.student)
        self.trained |= {name for name, p in self.student.named_parameters() if p.requires_grad or p in maps}

    def _what_weights_depend_on(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads(json.dumps(self.settings.to_dict()))
        return known | {"rows_per_step": self.rows_per_step, "length_factors": self.settings.factors()}

    def _resume(self) -> Checkpoint | None:
        found = None if self.folder is None else load_newest(self.folder / "checkpoints")
        if found is None:
            return None
        now, before = self._what_weights_depend_on(), settings_then(found.meta["settings"])
        changed = [
            f"{name} {before.get(name)!r} -> {now.get(name)!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name) and name not in FREE_TO_CHANGE
        ]
        if changed:
            rule = "hold a run with the same settings"
            remedy = f"Changed: {', '.join(changed)}. Restore them, or choose another folder."
            raise ArgumentError("output_dir", rule, str(self.folder), remedy)
        logger.info("going on from %s", found.path)
        return found

    def _save(self, stage: Stage, step: int, done: int, optimizer: torch.optim.Optimizer) -> None:
        keep = self.accelerator.is_main_process
        tensors = full_tensors(self.student, self.trained, keep)
        state = full_optimizer_state(optimizer, keep)
        if self.accelerator.is_main_process and self.folder is not None:
            meta = {"stage": stage.name, "step": step, "settings": self._what_weights_depend_on()}
            meta |= {"history": self.history, "tokens": self.tokens, "elapsed_s": self.elapsed_s}
            keep_last = self.settings.keep_checkpoints
            save_checkpoint(self.folder / "checkpoints", done + step, tensors, state, meta, keep=keep_last)
        self.accelerator.wait_for_everyone()

    def _load_student(self, tensors: Mapping[str, Tensor]) -> None:
        own = dict(self.student.named_parameters())
        if unknown := sorted(set(tensors) - set(own)):
            rule, where = "hold checkpoints of this model", str(self.folder)
            raise CheckpointError("output_dir", rule, unknown[0], "Choose another folder.", where=where)
        with torch.no_grad():
            for name, x in tensors.items():
                own[name].copy_(distributed_like(x, own[name]))

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, values in state["state"].items():
            for key, x in values.items():
                if isinstance(x, Tensor) and x.ndim:
                    values[key] = distributed_like(x, parameters[index])
        optimizer.load_state_dict(state)


def readers(settings: DistillationSettings, accelerator: Accelerator) -> int:
    """Return how many groups of processes read sequences of their own; refuse where these are too few for all."""
    size, processes = settings.context_parallel, int(accelerator.num_processes)
    if processes % size:
        remedy = "Start as many with torchrun, or a multiple."
        raise ArgumentError("context_parallel", f"divide the {processes} processes", size, remedy)
    rows = settings.rows * settings.accumulation * processes // size
    for stage in map(stage_class, settings.stages):
        for step in range(len(stage.lengths(settings))):
            number = len(stage.sequences(settings, step, rows).numbers)
            if not stage.splits and number % processes:
                rule = f"leave a whole sequence of `{stage.name}` for each of {processes} processes"
                remedy = "Raise rows or accumulation, or run that stage before, without it."
                raise ArgumentError("context_parallel", rule, f"{number} sequences in a step", remedy)
    return processes // size


def lr_share(step: int, steps: int, warmup_share: float) -> float:
    """Return the learning rate of a step as a share of its peak: a rise, then a straight line towards 0.

    Example:
        >>> [lr_share(step, 4, 0.25) for step in range(4)]
        [1.0, 0.75, 0.5, 0.25]
    """
    warmup = max(1, round(warmup_share * steps))
    return min(1.0, (step + 1) / warmup) * (1 - step / steps)


def peak_mib(device: torch.device) -> float:
    """Return the most memory this process held: the allocator's on an accelerator, else its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@torch.no_grad()
def first_not_finite(model: nn.Module, batch: Batch) -> str:
    """Name the first parameter or module whose values are not finite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"parameter {name}"
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and not found and not torch.isfinite(first).all():
                found.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        model(**model_inputs(batch))
    finally:
        for handle in handles:
            handle.remove()
    return f"layer {found[0]}" if found else "no layer's output; the gradient is not finite"
