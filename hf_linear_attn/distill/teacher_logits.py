"""A teacher's logits on disk, so that a large teacher is run once and paid for once.

For every weighted token of every training sequence the k likeliest next tokens are kept with their log-probabilities;
what they leave over is one class of its own. The loss is then the KL divergence over k + 1 classes, which is a lower
bound of the full one.
"""

import json
import math
import zlib
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from typing_extensions import override

from hf_linear_attn.distill.data import Batch, Data
from hf_linear_attn.distill.folder import READ
from hf_linear_attn.distill.forward import Predictor, counted, weighted
from hf_linear_attn.distill.losses import kl_loss
from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.teacher import Divergence, Teacher
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.files import locked, output_folder, paths_read, remove, whole_file, write_atomic

logger = getLogger(__name__)

INDEX, ROWS = "index.json", "rows-*-*.safetensors"
ROWS_PER_FILE = 256
TOP_K = 64
"""Classes kept per token."""


def logits_folder(settings: DistillationSettings, folder: Path, teacher: nn.Module | None = None) -> None:
    """Check the folder that logits are written to, by :func:`hf_linear_attn.files.output_folder`."""
    inputs = paths_read(settings, READ, teacher=teacher)
    output_folder(folder, "teacher_logits", inputs=inputs, marks=[ROWS], overwrite=settings.overwrite)


def sequences(settings: DistillationSettings, rows_per_step: int) -> dict[int, range]:
    """Return the numbers of the sequences of the stage ``distill``, by length."""
    stage = stage_class("distill")
    before = settings.stages[: settings.stages.index("distill")]
    first = sum(stage_class(name).steps(settings) for name in before)
    found: dict[int, range] = {}
    for step in range(first, first + settings.distill_steps):
        length, numbers, _ = stage.sequences(settings, step, rows_per_step)
        found[length] = range(found.get(length, numbers).start, numbers.stop)
    return found


@torch.no_grad()
def write_teacher_logits(
    settings: DistillationSettings,
    teacher: nn.Module,
    data: Data,
    folder: Path,
    *,
    top_k: int = TOP_K,
    processes: int = 1,
) -> None:
    """Run the teacher over the sequences of the stage ``distill`` and keep its top-k logits.

    A run that was stopped goes on after the last whole file.

    Settings, training data and number of processes are those of the distillation that will read the logits.

    Raises:
        ArgumentError: If ``top_k`` is below 1, or another than that of the folder, or the folder holds what is read, or
            files that are no logits.
        CheckpointError: If the folder holds logits of other data, is in use, or full.
    """
    if top_k < 1:
        raise ArgumentError("top_k", "be at least 1", top_k, f"Keep {TOP_K} or so.")
    device = next(teacher.parameters()).device
    predictor = Predictor(teacher)
    wanted = sequences(settings, settings.rows * settings.accumulation * processes)
    total = sum(len(numbers) for numbers in wanted.values())
    logits_folder(settings, folder, teacher)
    with (
        locked(folder, "teacher_logits"),
        tqdm(total=total, desc="teacher logits", disable=not settings.progress) as bar,
    ):
        if settings.overwrite:
            remove(folder, (ROWS, INDEX))
        for length, whole in wanted.items():
            # As many tokens per forward as the distillation has.
            rows = max(1, settings.rows * settings.block_tokens // length)
            for start in whole[::ROWS_PER_FILE]:
                numbers = range(start, min(start + ROWS_PER_FILE, whole.stop))
                path = folder / file_name(length, start)
                if _holds(path, numbers, data.batch(numbers[:1], length), top_k):
                    bar.update(len(numbers))
                    continue
                tensors: dict[str, Tensor] = {}
                for first in numbers[::rows]:
                    some = range(first, min(first + rows, numbers.stop))
                    tensors |= _top_logits(predictor, data.batch(some, length).to(device), top_k)
                    bar.update(len(some))
                _save(path, tensors, top_k)
        firsts = {length: numbers.start for length, numbers in wanted.items()}
        write_atomic(folder / INDEX, json.dumps({"first": firsts, "top_k": top_k}))


def _top_logits(predictor: Predictor, batch: Batch, top_k: int) -> dict[str, Tensor]:
    states = weighted(batch, predictor.states(batch))
    tops: list[tuple[Tensor, Tensor]] = []
    for which in predictor.pieces(states):
        logits = predictor.logits(states[which]).float()
        top = logits.topk(min(top_k, logits.shape[-1]))
        tops.append((top.indices, top.values - logits.logsumexp(-1, keepdim=True)))
    indices, log_p = (torch.cat(kept) for kept in zip(*tops, strict=True))
    counts = (batch.weights[:, 1:] > 0).sum(1).tolist()
    found: dict[str, Tensor] = {}
    rows = zip(batch.numbers, torch.split(indices, counts), torch.split(log_p, counts), strict=True)
    for index, (name, tokens, kept) in enumerate(rows):
        found[f"{name}.tokens"] = tokens.to("cpu", torch.int32)
        found[f"{name}.log_p"] = kept.to("cpu", torch.float16)
        found[f"{name}.crc32"] = torch.tensor(fingerprint(batch.rows(index, index + 1)))
    return found


def _holds(path: Path, numbers: range, first: Batch, top_k: int) -> bool:
    """Tell whether a file is there and has all those sequences."""
    try:
        with safe_open(path, framework="pt") as file:
            expected = file.get_tensor(f"{numbers[0]}.crc32").item()
            known = int(file.metadata()["top_k"])
            complete = f"{numbers[-1]}.crc32" in file.keys()  # noqa: SIM118
    except FileNotFoundError:
        return False
    except SafetensorError:
        logger.warning("%s is damaged and written anew", path)
        return False
    check_fingerprint(expected, first, numbers[0], path.parent)
    if known != top_k:
        rule, where = f"be that of the folder, {known}", str(path.parent)
        raise ArgumentError("top_k", rule, top_k, "Choose another folder.", where=where)
    return complete


def _save(path: Path, tensors: dict[str, Tensor], top_k: int) -> None:
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, {"top_k": str(top_k)})
    except (OSError, SafetensorError) as error:
        remedy = f"Writing failed ({error}); make room and run again to go on."
        raise CheckpointError("teacher_logits", "have room for the logits", str(path.parent), remedy) from error


def file_name(length: int, start: int) -> str:
    """Return the name of the file that begins with a sequence of some length."""
    return f"rows-{length}-{start:09d}.safetensors"


def fingerprint(batch: Batch) -> int:
    """Return a checksum of a sequence and its weights."""
    ids = batch.input_ids.to("cpu", torch.int64).numpy().tobytes()
    return zlib.crc32(batch.weights.cpu().numpy().tobytes(), zlib.crc32(ids))


def check_fingerprint(expected: int, batch: Batch, number: int, folder: Path) -> None:
    """Refuse logits of another sequence than that of ``batch``."""
    if expected != fingerprint(batch):
        remedy = "write the logits to an empty folder, or restore dataset, seed and block_tokens."
        remedy = f"Sequence {number} differs: {remedy}"
        raise CheckpointError("teacher_logits", "come from the same data", str(folder), remedy)


class TeacherLogits(Teacher):
    """What :func:`write_teacher_logits` wrote to a folder.

    Raises:
        CheckpointError: If it is incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())
        except (OSError, ValueError) as error:
            remedy = "Run `hf-linear-attn teacher-logits` to its end."
            raise CheckpointError("teacher_logits", "be a folder of precomputed logits", str(folder), remedy) from error

    def row(self, number: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the kept tokens ``[N, k]`` and log-probabilities ``[N, k]`` of one sequence.

        Raises:
            CheckpointError: If the sequence is not there, or is another than the one the teacher saw.
        """
        length = batch.input_ids.shape[1]
        first = self.index["first"].get(str(length), 0)
        path = self.folder / file_name(length, first + (number - first) // ROWS_PER_FILE * ROWS_PER_FILE)
        try:
            with safe_open(path, framework="pt") as file:
                tokens, log_p = file.get_tensor(f"{number}.tokens"), file.get_tensor(f"{number}.log_p")
                expected = file.get_tensor(f"{number}.crc32").item()
        except (OSError, SafetensorError) as error:
            rule, remedy = f"hold sequence {number} of {length} tokens", "Write the logits with these settings."
            raise CheckpointError("teacher_logits", rule, str(self.folder), remedy) from error
        check_fingerprint(expected, batch, number, self.folder)
        return tokens.long(), log_p.float()

    @override
    def divergence(self, batch: Batch) -> Divergence:
        """Return the KL divergence over k + 1 classes."""
        whole = batch if batch.part is None else batch.part.whole
        rows = [self.row(number, whole.rows(index, index + 1)) for index, number in enumerate(whole.numbers)]
        tokens, log_p = (torch.cat(kept).to(whole.input_ids.device) for kept in zip(*rows, strict=True))
        if batch.part is not None:
            place = counted(whole) % (whole.input_ids.shape[1] - 1)
            here = (place >= batch.part.own.start) & (place < batch.part.own.stop)
            tokens, log_p = tokens[here], log_p[here]
        return stored_divergence(tokens, log_p)


def stored_divergence(tokens: Tensor, log_p: Tensor) -> Divergence:
    """Return the KL divergence over the kept tokens ``[N, k]`` and one class for all others."""

    def divergence(logits: Tensor, weights: Tensor, which: slice) -> Tensor:
        chosen, expected = tokens[which], log_p[which]
        log_q = logits.float().log_softmax(-1).gather(-1, chosen)
        if chosen.shape[-1] == logits.shape[-1]:
            return kl_loss(log_q, expected, weights)
        return kl_loss(with_rest(log_q), with_rest(expected), weights)

    return divergence


def with_rest(log_p: Tensor) -> Tensor:
    """Append the logarithm of the probability that is left over."""
    rest = (-log_p.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6)).log1p()
    return torch.cat([log_p, rest.clamp_min(math.log(1e-6))], dim=-1)
