"""What a model writes when it is asked, beside how likely it finds the true answer.

A student may rank a true answer as its teacher does and still not write it: in one comparison students of 7B were 0.2
points behind by likelihood and 20.8 by generated answers (arXiv:2603.26556). So both are measured, on the same prompts.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor
from hf_linear_attn.evaluation.generation import PrefixReader, end_tokens, forward, greedy
from hf_linear_attn.evaluation.scores import at_chance
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.tasks import Sample, Task, available_tasks, is_exact, parse_task, sample_rng, true_answer
from hf_linear_attn.evaluation.tasks.haystack import encode_once
from hf_linear_attn.loading import position_limit

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
def measure_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    samples: int,
    seed: int,
    tasks: Sequence[str] = TASKS,
    factors: Sequence[int] = FACTORS,
    cached: bool = True,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Ask a model at growing lengths, and compare what it writes with the true answers.

    What is asked for stands at depths that are spread evenly over the first 75%.

    Args:
        model: A causal language model in evaluation mode; PEFT may be around it.
        tokenizer: Its tokenizer.
        length: Tokens of the shortest prompts, their answers included.
        samples: Prompts per task and length, at least 1.
        seed: Of the prompts.
        tasks: Tasks, described as settings do; those that name no haystack are in noise.
        factors: Lengths as multiples of ``length``.
        cached: Whether answers are generated token by token from the cache, as ``generate`` does. Otherwise one forward
            over prompt and true answer tells whether greedy decoding would write it: for softmax attention that has no
            cache.
        progress: Show a progress bar.

    Returns:
        For every task and length ``task``, ``length``, whether it is ``held_out`` of training, its ``haystack`` and
        ``chance``, ``n``, ``exact`` (share of prompts for which greedy decoding
        writes the true answer), ``ci95`` (Wilson's 95% interval of it), ``answer_nats`` (mean negative log-likelihood
        per token of the true answers) and ``missing``: None, or why nothing was measured, with the figures None.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    limit = position_limit(whole)
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(tasks) * len(factors), desc="answers", disable=not progress) as bar:
        for task in map(parse_task, tasks):
            for factor in factors:
                found: dict[str, Any] = {"task": task.label, "length": factor * length, "n": 0, "missing": None}
                found |= task.facts()
                found |= {"exact": None, "ci95": None, "answer_nats": None}
                if limit is not None and limit < factor * length:
                    found["missing"] = NO_POSITIONS
                elif task.min_length(tokenizer) > factor * length:
                    found["missing"] = TOO_SHORT
                elif task.haystack.size(tokenizer) < factor * length:
                    found["missing"] = NO_TEXT
                else:
                    asked = prompts(tokenizer, task, factor * length, samples, seed)
                    ask = written if cached else foretold
                    found |= figures(asked, ask(whole, tokenizer, asked, max(1, ROWS // factor)))
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
    """Return a row's figures in words: the share of right answers with its interval, and the likelihood.

    Args:
        row: A model's.
        teacher: The teacher's of the same questions: where it does no better than chance, nothing is asked of others.
    """
    if row["missing"]:
        return str(row["missing"])
    if teacher is not None and teacher["ci95"] and at_chance(teacher["ci95"], teacher.get("chance", 0.0)):
        return NOT_ASKED
    low, high = row["ci95"]
    return f"{row['exact']:.2f} ({low:.2f} to {high:.2f}), {row['answer_nats']:.2f} nats"


def figures(asked: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, Any]:
    """Sum up answers to samples."""
    right = sum(is_exact(sample, text) for sample, (text, _) in zip(asked, answers, strict=True))
    nats = [nat for _, each in answers for nat in each]
    return {
        "n": len(answers),
        "exact": right / len(answers),
        "ci95": list(wilson_interval(right, len(answers))),
        "answer_nats": sum(nats) / len(nats),
    }


def written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Sample], at_once: int
) -> list[Answer]:
    """Let a model answer from its cache."""
    batches = [asked[start : start + at_once] for start in range(0, len(asked), at_once)]
    read = [[torch.tensor(sample.input_ids) for sample in batch] for batch in batches]
    pad = tokenizer.pad_token_id or 0
    reader = PrefixReader(model, max(len(sample.input_ids) for sample in asked), pad)
    ends = end_tokens(model, tokenizer)
    answers: list[Answer] = []
    for number, batch in enumerate(batches):
        reader.advance(read[number], read[number + 1] if number + 1 < len(batches) else None)
        logits, cache, mask = reader.read(read[number])
        true = [encode_once(tokenizer, true_answer(sample)) for sample in batch]
        nats = true_nats(model, logits, copy.deepcopy(cache), true, pad, mask)
        # Two more show whether a word goes on; what follows an answer is nobody's question.
        budget = max(map(len, true)) + 2
        texts = [
            str(tokenizer.decode(tokens, skip_special_tokens=True))
            for tokens in greedy(model, logits, cache, budget, ends, mask)
        ]
        answers += zip(texts, nats, strict=True)
    return answers


def true_nats(
    model: PreTrainedModel,
    logits: Tensor,
    cache: Any,
    true: Sequence[Sequence[int]],
    pad: int,
    mask: Tensor | None,
) -> list[list[float]]:
    """Return the nats of each token of the true answers.

    Args:
        model: The model.
        logits: Of the prompts' last tokens, ``[B, 1, vocabulary]``.
        cache: The prompts' cache; it is consumed.
        true: The answers' tokens.
        pad: Any token, to fill up short answers.
        mask: Of the prompts, ``[B, T]``; None where nothing is padded.
    """
    width = max(map(len, true))
    ids = torch.full((len(true), width), pad, device=logits.device)
    for row, answer in enumerate(true):
        ids[row, : len(answer)] = torch.tensor(answer)
    if width > 1:
        positions = None
        if mask is not None:
            first = mask.sum(-1, keepdim=True)
            positions = first + torch.arange(width - 1, device=mask.device)
            mask = torch.cat([mask, mask.new_ones(len(true), width - 1)], dim=-1)
        following, _ = forward(model, ids[:, :-1], cache, attention_mask=mask, position_ids=positions)
        logits = torch.cat([logits, following], dim=1)
    nats = -logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return [row[: len(answer)] for row, answer in zip(nats.tolist(), true, strict=True)]


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
        width = max(len(sample.input_ids) + len(answer) for sample, answer in zip(batch, true, strict=True))
        ids = torch.zeros(len(batch), width, dtype=torch.long, device=device)
        for row, (sample, answer) in enumerate(zip(batch, true, strict=True)):
            ids[row, : len(sample.input_ids) + len(answer)] = torch.tensor([*sample.input_ids, *answer])
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
