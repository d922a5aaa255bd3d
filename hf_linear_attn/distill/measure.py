"""The scale-free numbers of a student: held-out nats, recall and answers, and an encoder's embeddings.

A student may rank a true answer as its teacher does and still not write it: in one comparison students of 7B were 0.2
points behind by likelihood and 20.8 by generated answers (arXiv:2603.26556). So both are measured, on the same prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.distill.data import Batch, Data
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts
from hf_linear_attn.encoders import Frame, Pooling
from hf_linear_attn.evaluation.embedding import compare_embeddings
from hf_linear_attn.evaluation.generation import evaluating
from hf_linear_attn.evaluation.scores import at_chance
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.tasks import (
    Sample,
    Task,
    available_tasks,
    get_task,
    is_exact,
    parse_task,
    sample_rng,
    true_answer,
)
from hf_linear_attn.evaluation.tasks.haystack import encode_once
from hf_linear_attn.loading import position_limit
from hf_linear_attn.patching import disable_branch

PAIRS = (4, 8)
"""Numbers of key-value pairs at which recall is measured."""

TASKS = (
    *(f"{name}:haystack=text" for name in available_tasks(held_out=True)),
    *("passkey", "kv_recall", "niah_multikey", "copying"),
)
"""What is asked: facts of forms that training never has, in real text; then, of forms that it has and in noise, a
number, the value of a key, the same among long keys, and a list of words to repeat."""

FACTORS = (1, 2, 4, 8)
"""Lengths, as multiples of the shortest sequences of the training."""

MAX_DEPTH = 75.0
"""Depth in percent beyond which nothing is asked for: what stands just before the question is in the window."""

ROWS = 8
"""Prompts of the shortest length in one forward; longer ones are fewer."""

Answer = tuple[str, list[float]]
"""What greedy decoding writes, and the nats of each token of the true answer."""

TOO_SHORT, NO_POSITIONS = "the task does not fit", "the model has no such positions"
NO_TEXT, NOT_ASKED = "the text is too short", "not asked: the teacher fails"


@torch.no_grad()
def heldout_loss(model: nn.Module, data: Data, rows: int, length: int) -> dict[str, float]:
    """Return a model's mean loss on a fixed choice of held-out sequences of so many tokens.

    It is ``loss_nats`` per token, and ``late_loss_nats`` over the second half of the positions.
    """
    device, predictor = next(model.parameters()).device, Predictor(model)
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    for start in range(0, rows, ROWS):
        texts = [data.text_row(number, length) for number in range(start, min(start + ROWS, rows))]
        found = data.collate(texts, length).to(device)
        states, targets = predictor.states(found)[:, :-1].flatten(0, 1), found.input_ids[:, 1:].flatten()
        pieces = [
            torch.nn.functional.cross_entropy(predictor.logits(states[which]).float(), targets[which], reduction="none")
            for which in predictor.pieces(states)
        ]
        losses.append(torch.cat(pieces).view(len(texts), -1))
        weights.append(found.weights[:, 1:])
    loss, weight = torch.cat(losses), torch.cat(weights)

    def mean(first: int) -> float:
        return ((loss * weight)[:, first:].sum() / weight[:, first:].sum()).item()

    return {"loss_nats": mean(0), "late_loss_nats": mean(length // 2)}


@torch.no_grad()
def recall_accuracy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: int,
    length: int,
    samples: int,
    seed: int,
    max_depth: float = 100.0,
) -> float | None:
    """Measure key-value recall: the share of samples after which greedy decoding would write the true answer first.

    One forward tells. What follows the answer does not count, not even where it goes on in the same word. No pair is
    asked for beyond a depth of ``max_depth`` percent, so that it may stand beyond a window at the end. None where the
    task does not fit into ``length`` tokens.
    """
    task = get_task("kv_recall", pairs=pairs)
    if task.min_length(tokenizer) > length:
        return None
    asked = []
    for index in range(samples):
        rng = sample_rng(seed, "kv_recall", length, 0, index)
        asked.append(task.build(tokenizer, length, rng.uniform(0, max_depth), rng))
    answers = foretold(model, tokenizer, asked, ROWS)
    right = [
        # Some tokenizers drop a space at the start of a text.
        text.strip().startswith(true_answer(sample).strip())
        for sample, (text, _) in zip(asked, answers, strict=True)
    ]
    return sum(right) / samples


@torch.no_grad()
def measure_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    samples: int,
    seed: int,
    tasks: Sequence[str] = TASKS,
    factors: Sequence[int] = FACTORS,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Ask a model at growing lengths, and compare what it would write with the true answers.

    What is asked for stands at depths that are spread evenly over the first 75%. One forward over prompt and true
    answer tells what greedy decoding would write: see :func:`foretold`.

    The model is in evaluation mode; PEFT may be around it. Prompts, their answers included, have ``length`` tokens
    times each of the factors; there are ``samples`` for each task and length. Tasks are described as settings do.

    Returns:
        For every task and length ``task``, ``length``, whether it is ``held_out`` of training, its ``haystack`` and
        ``chance``, ``n``, ``exact`` (share of prompts for which greedy decoding writes the true answer), ``ci95``
        (Wilson's 95% interval of it), ``answer_nats`` (mean negative log-likelihood per token of the true answers) and
        ``missing``: None, or why nothing was measured, with the figures None.
    """
    limit = position_limit(model.get_base_model() if isinstance(model, PeftModel) else model)  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(tasks) * len(factors), desc="answers", disable=not progress) as bar:
        for task in map(parse_task, tasks):
            for factor in factors:
                size = factor * length
                found = {"task": task.label, "length": size, "n": 0, "missing": None, **task.facts()}
                found |= {"exact": None, "ci95": None, "answer_nats": None}
                if limit is not None and limit < size:
                    found["missing"] = NO_POSITIONS
                elif task.min_length(tokenizer) > size:
                    found["missing"] = TOO_SHORT
                elif task.haystack.size(tokenizer) < size:
                    found["missing"] = NO_TEXT
                else:
                    asked = prompts(tokenizer, task, size, samples, seed)
                    answers = foretold(model, tokenizer, asked, max(1, ROWS // factor))
                    right = sum(is_exact(sample, text) for sample, (text, _) in zip(asked, answers, strict=True))
                    nats = [nat for _, each in answers for nat in each]
                    found |= {"n": samples, "exact": right / samples, "ci95": list(wilson_interval(right, samples))}
                    found["answer_nats"] = sum(nats) / len(nats)
                rows.append(found)
                bar.update()
    return rows


def prompts(tokenizer: PreTrainedTokenizerBase, task: Task, length: int, samples: int, seed: int) -> list[Sample]:
    """Build the samples of a task and length, by depth."""
    depths = [MAX_DEPTH * (index + 0.5) / samples for index in range(samples)]
    return [
        task.build(tokenizer, length, depth, sample_rng(seed, task.spec, length, 0, index))
        for index, depth in enumerate(depths)
    ]


def shown(row: dict[str, Any], teacher: dict[str, Any] | None = None) -> str:
    """Return a row's figures in words, unless the teacher does no better than chance at the same questions."""
    if row["missing"]:
        return str(row["missing"])
    if teacher is not None and teacher["ci95"] and at_chance(teacher["ci95"], teacher.get("chance", 0.0)):
        return NOT_ASKED
    low, high = row["ci95"]
    return f"{row['exact']:.2f} ({low:.2f} to {high:.2f}), {row['answer_nats']:.2f} nats"


def foretold(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Sample], at_once: int
) -> list[Answer]:
    """Read off one forward how greedy decoding would begin, up to a token after the true answer or the first false one.

    A token is the likeliest after the true ones before it exactly when greedy decoding, right so far, writes it.
    """
    predictor = Predictor(model)
    device = next(model.parameters()).device
    answers: list[Answer] = []
    for start in range(0, len(asked), at_once):
        batch = asked[start : start + at_once]
        true = [encode_once(tokenizer, true_answer(sample)) for sample in batch]
        rows = [torch.tensor([*sample.input_ids, *answer]) for sample, answer in zip(batch, true, strict=True)]
        ids = pad_sequence(rows, batch_first=True).to(device)
        states = predictor.states(Batch(ids, ids, ids))
        for row, (sample, answer) in enumerate(zip(batch, true, strict=True)):
            last = len(sample.input_ids) - 1
            logits = predictor.logits(states[row, last : last + len(answer) + 1]).float()
            best = logits.argmax(-1).tolist()
            wrong = next((place for place, token in enumerate(answer) if best[place] != token), len(answer))
            text = str(tokenizer.decode(best[: wrong + 1], skip_special_tokens=True))
            targets = torch.tensor(answer, device=device)[:, None]
            nats = -logits[:-1].log_softmax(-1).gather(-1, targets)[:, 0]
            answers.append((text, nats.tolist()))
    return answers


def measure(
    model: nn.Module,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    length: int,
    seed: int,
    samples: int = 64,
    branches: bool = True,
    answers: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure a model on held-out text, on key-value recall and by what it writes.

    A student with a window is measured again with its linear branch off: what that costs is what the branch does.

    Args:
        model: A causal language model, patched or not.
        data: Held-out data.
        tokenizer: Its tokenizer.
        rows: Text sequences.
        length: Tokens of a sequence.
        seed: Of the recall samples.
        samples: Recall samples per number of pairs.
        branches: Whether a student is measured without its linear branch too.
        answers: Questions per task and length that it answers in writing, see :func:`measure_answers`; 0 for none.
        progress: Show a progress bar meanwhile.

    Returns:
        ``loss_nats``, ``late_loss_nats``, ``recall`` by number of pairs, ``linear_off`` with the same or None, and
        ``answers`` as :func:`measure_answers` returns them, none where none were asked for.
    """
    has_branches = branches and any(
        part.settings.window is not None and part.settings.mix != "window" for part in linear_attention_parts(model)
    )

    def once() -> dict[str, Any]:
        options: dict[str, Any] = {"length": length, "samples": samples, "seed": seed, "max_depth": MAX_DEPTH}
        recall = {str(pairs): recall_accuracy(model, tokenizer, pairs=pairs, **options) for pairs in PAIRS}
        return {**heldout_loss(model, data, rows, length), "recall": recall}

    asked: dict[str, Any] = {"length": length, "samples": answers, "seed": seed, "progress": progress}
    with evaluating(model):
        result = once() | {"linear_off": None}
        if has_branches:
            with disable_branch(model, "linear"):
                result["linear_off"] = once()
        result["answers"] = measure_answers(model, tokenizer, **asked) if answers else []
    return result


def measure_encoders(
    models: Mapping[str, nn.Module],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    pooling: Pooling,
    *,
    rows: int,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Do as :func:`compare_embeddings` on held-out texts that have, in turn, so many tokens, special ones included."""
    frame = Frame.of(tokenizer)
    texts = []
    for number in range(rows):
        row, index = divmod(number, len(lengths))
        ids = data.text_row(row, lengths[index]).input_ids
        texts.append(ids[len(frame.begin) : len(ids) - len(frame.end)])
    return compare_embeddings(models, texts, frame, pooling, pad=data.pad)
