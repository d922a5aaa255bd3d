"""A teacher's logits on disk, so that a large teacher is run once and paid for once.

For every weighted token of every training sequence the k likeliest next tokens are kept with their log-probabilities;
what they leave over is one class of its own. The loss is then the KL divergence over k + 1 classes, which is a lower
bound of the full one.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_linear_attn.distill.checkpoint import write_atomic
from hf_linear_attn.distill.data import Batch, Data, sequences_of
from hf_linear_attn.distill.losses import kl_loss
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages import predictions
from hf_linear_attn.errors import CheckpointError, explain

INDEX = "index.json"
ROWS_PER_FILE = 256


def sequences(settings: DistillationSettings, rows_per_step: int) -> dict[int, range]:
    """Return the numbers of the sequences of the stage ``distill``, by length."""
    first = settings.transfer_steps if "transfer" in settings.stages else 0
    found: dict[int, range] = {}
    for step in range(first, first + settings.distill_steps):
        length, numbers, _ = sequences_of(settings, "distill", step, rows_per_step)
        found[length] = range(found.get(length, numbers).start, numbers.stop)
    return found


@torch.no_grad()
def write_teacher_logits(
    settings: DistillationSettings,
    teacher: nn.Module,
    data: Data,
    folder: Path,
    *,
    top_k: int = 64,
    rows_per_step: int | None = None,
) -> None:
    """Run the teacher over the sequences of the stage ``distill`` and keep its top-k logits.

    A run that was stopped goes on after the last whole file.

    Args:
        settings: Those of the distillation that will read the logits.
        teacher: The softmax model.
        data: The training data.
        folder: Where the files go.
        top_k: Classes kept per token.
        rows_per_step: Sequences per optimiser step over all processes; defaults to those of one process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows_per_step = rows_per_step or settings.rows * settings.accumulation
    device = next(teacher.parameters()).device
    wanted = sequences(settings, rows_per_step)
    starts = [(length, start) for length, numbers in wanted.items() for start in numbers[::ROWS_PER_FILE]]
    for length, start in tqdm(starts, desc="teacher logits", disable=not settings.progress):
        path = folder / file_name(length, start)
        if path.exists():
            continue
        tensors: dict[str, Tensor] = {}
        for number in range(start, min(start + ROWS_PER_FILE, wanted[length].stop)):
            batch = data.batch([number], length)
            logits = predictions(teacher, batch.to(device))[2]
            top = logits.float().log_softmax(-1).topk(min(top_k, logits.shape[-1]))
            tensors[f"{number}.tokens"] = top.indices.to(torch.int32).cpu()
            tensors[f"{number}.log_p"] = top.values.to(torch.float16).cpu()
            tensors[f"{number}.crc32"] = torch.tensor(fingerprint(batch))
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary)
        temporary.rename(path)
    firsts = {length: numbers.start for length, numbers in wanted.items()}
    write_atomic(folder / INDEX, json.dumps({"first": firsts, "top_k": top_k}))


def file_name(length: int, start: int) -> str:
    """Return the name of the file that begins with a sequence of some length."""
    return f"rows-{length}-{start:09d}.safetensors"


def fingerprint(batch: Batch) -> int:
    """Return a checksum of a sequence and its weights."""
    ids = batch.input_ids.to("cpu", torch.int64).numpy().tobytes()
    return zlib.crc32(batch.weights.cpu().numpy().tobytes(), zlib.crc32(ids))


class TeacherLogits:
    """What :func:`write_teacher_logits` wrote.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: If it is incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                explain(
                    "teacher_logits",
                    "be a folder of precomputed logits",
                    str(folder),
                    "Run write_teacher_logits to its end.",
                )
            ) from error

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
            raise CheckpointError(
                explain(
                    "teacher_logits",
                    f"hold sequence {number} of {length} tokens",
                    str(self.folder),
                    "Write the logits with these settings.",
                )
            ) from error
        if expected != fingerprint(batch):
            raise CheckpointError(
                explain(
                    "teacher_logits",
                    "come from the same data",
                    str(self.folder),
                    f"Sequence {number} differs: write the logits again, or restore dataset, seed and block_tokens.",
                )
            )
        return tokens.long(), log_p.float()

    def loss(self, student: Tensor, batch: Batch, numbers: list[int], weights: Tensor) -> Tensor:
        """Sum ``w KL`` over k + 1 classes; arguments as in :func:`kl_loss`, the rows' numbers in place of logits."""
        rows = [self.row(number, batch.rows(index, index + 1)) for index, number in enumerate(numbers)]
        tokens = torch.cat([row[0] for row in rows]).to(student.device)
        log_p = torch.cat([row[1] for row in rows]).to(student.device)
        log_q = student.float().log_softmax(-1).gather(-1, tokens)
        if tokens.shape[-1] == student.shape[-1]:
            return kl_loss(log_q, log_p, weights)
        return kl_loss(with_rest(log_q), with_rest(log_p), weights)


def with_rest(log_p: Tensor) -> Tensor:
    """Append the logarithm of the probability that is left over."""
    rest = (-log_p.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6)).log1p()
    return torch.cat([log_p, rest.clamp_min(math.log(1e-6))], dim=-1)
