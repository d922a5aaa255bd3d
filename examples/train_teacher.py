r"""Train the small softmax Llama that the examples distil from, on one CPU and without a download, or a larger one.

The teacher reads Python (the interpreter's own standard library) and answers recall questions, because only text with
long dependencies tells linear attention methods apart. It is trained in three stages. `repeat` shows random segments
twice or more, which forms induction heads; `recall` asks for the values of keys; `mix` is source text with recall
tasks and some repetition, down to a low learning rate. Recall mixed into text from scratch is not learned.

    python examples/train_teacher.py                  # some three hours on one core; resumes where it was stopped
    python examples/train_teacher.py --export-only    # measure the last checkpoint and write it
    python examples/train_teacher.py --steps-scale 0.001 --max-documents 20 --samples 2 --lengths 256 \
        --run-dir runs/smoke --output-dir runs/smoke/teacher    # a smoke run

The one that ships saw four times the tokens, in five minutes of an H100:

    python examples/train_teacher.py --device cuda --bf16 --workers 3 --tokens-scale 4 --samples 100

A teacher of 86M parameters, on a GPU and with the source text of the installed packages as well:

    python examples/train_teacher.py --device cuda --bf16 --width 768 --layers 12 --heads 12 --kv-heads 6 \
        --vocab-size 8192 --tokens-scale 8 --workers 8 \
        --text "$(python -c 'import site; print(site.getsitepackages()[0])')" \
        --run-dir runs/teacher-86m --output-dir runs/teacher-86m/teacher
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from ngram_baseline import NgramModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_linear_attn.distill.data.recall import training_task
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.evaluation.tasks import Sample, available_tasks, get_task, sample_rng
from hf_linear_attn.evaluation.tasks.pairs import KVRecall
from hf_linear_attn.evaluation.tasks.words import NOUNS

logger = logging.getLogger("train_teacher")

# Tokens of a context in the last stage, and the share of its batches that have so many.
MIX_LENGTHS = {512: 0.7, 1024: 0.12, 2048: 0.1, 4096: 0.08}
TRAINED_LENGTH, LONGEST_LENGTH = min(MIX_LENGTHS), max(MIX_LENGTHS)
LOG_LINES = 100
LENGTHS, DEPTHS, PAIRS = (256, 512, 1024, 2048, 4096), (0, 25, 50, 75, 100), (2, 4, 8, 16)


@dataclass(frozen=True)
class Stage:
    """A stretch of training.

    Args:
        name: What its batches are made of; see `Data.batch`.
        steps: Optimiser steps.
        tokens_per_step: Tokens of a batch.
        first_length: Tokens of a context at the start; it grows to `TRAINED_LENGTH`.
        matrix_lr: Muon's learning rate, for the matrices inside the layers.
        other_lr: AdamW's, for the embeddings and norms.
    """

    name: str
    steps: int
    tokens_per_step: int
    first_length: int
    matrix_lr: float
    other_lr: float


STAGES = (
    Stage("repeat", 500, 2048, 64, 0.02, 1e-3),
    Stage("recall", 550, 4096, 128, 0.01, 5e-4),
    Stage("mix", 5000, 8192, TRAINED_LENGTH, 0.02, 3e-3),
)
WARMUP_STEPS = 50
EMBEDDING_STD, EMBEDDING_CONSTANT, PREVIOUS_TOKEN_GAIN, PREVIOUS_TOKEN_BANDS = 0.1, 0.4, 2.0, 6
FINAL_LR_SHARE = 0.02
# Of the rows of a batch; of its tokens, one that holds few long contexts has half.
TEXT_SHARE, LONG_TEXT_SHARE = 0.65, 0.5
# Of the rows of short batches: those whose positions leap, and how often they leap at most.
LEAPING_SHARE, MOST_LEAPS = 0.5, 3
TRAINED_TASKS = {"passkey": 8, "kv_recall": 5, "niah_single": 3, "niah_multikey": 1}
# Room for a further question of key-value recall and its answer.
QUESTION_TOKENS = 14
# A batch's loss is the mean over its rows of text plus this times the mean over its rows with answers.
ANSWER_WEIGHT = 0.5
TEXT_SUFFIXES = (".py", ".md", ".rst", ".txt")
MOST_BYTES = 2**19
"""Of a file of further text: what is longer is a table or a bundle."""


def task_text(rng: random.Random) -> str:
    """Return task sentences for the tokenizer to learn from, so that prompts do not fall apart into letters."""
    plain = PreTrainedTokenizerFast(tokenizer_object=_byte_tokenizer())
    parts = []
    for name in available_tasks(held_out=False):
        task = training_task(name)
        for _ in range(150):
            length = task.min_length(plain) + 256
            parts.append(plain.decode(task.build(plain, length, rng.uniform(0, 100), rng).input_ids))
    return "\n".join(parts)


def _byte_tokenizer() -> Tokenizer:
    """Return an untrained byte-level BPE tokenizer: its vocabulary is the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    # Digits stay single tokens, so that a number is recalled digit by digit whatever its value.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(documents: Sequence[str], seed: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on the training documents and on task sentences."""
    tokenizer = _byte_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*documents, task_text(random.Random(seed))], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )


def make_model(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    rope_theta: float = 500_000.0,
) -> LlamaForCausalLM:
    """Make the untrained teacher, with previous-token heads in its first layer.

    A previous-token head is the first half of an induction head, and the half that takes long to form: with it given,
    copying is learned in about 150 steps of 2048 tokens; without it, not in 400. Training may change it at will.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    frequencies = model.model.rotary_emb.inv_freq[:PREVIOUS_TOKEN_BANDS]
    attention = model.model.layers[0].self_attn
    half, group = attention.head_dim // 2, attention.num_key_value_groups
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.normal_(0, EMBEDDING_STD)
        # One coordinate is the same for all tokens: keys read it as they are, queries read it turned back by one
        # position, so that rotary scores sum_f cos(theta_f (distance - 1)) peak at the token before.
        embedding[:, 0] = EMBEDDING_CONSTANT
        for head in range(0, model.config.num_attention_heads, group):
            key = attention.k_proj.weight[head // group * 2 * half :]
            query = attention.q_proj.weight[head * 2 * half :]
            key[:PREVIOUS_TOKEN_BANDS, 0] += PREVIOUS_TOKEN_GAIN
            query[:PREVIOUS_TOKEN_BANDS, 0] += PREVIOUS_TOKEN_GAIN * frequencies.cos()
            query[half : half + PREVIOUS_TOKEN_BANDS, 0] -= PREVIOUS_TOKEN_GAIN * frequencies.sin()
    return model


@dataclass(frozen=True)
class Batch:
    """Token ids `[B, T]`, their positions, and the weight of each one's loss; a token of weight 0 is context only."""

    input_ids: Tensor
    positions: Tensor
    weights: Tensor


class Data:
    """The batches of every step: batch `n` depends on the seed and on `n` alone, so a resumed run sees the same."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], seed: int, tokens_scale: int = 1
    ) -> None:
        """Tokenise the documents into one stream, each ended by EOS."""
        self.tokenizer = tokenizer
        self.seed = seed
        self.tokens_scale = tokens_scale
        stream: list[int] = []
        for encoding in tokenizer.backend_tokenizer.encode_batch(list(documents), add_special_tokens=False):
            stream += [tokenizer.bos_token_id, *encoding.ids, tokenizer.eos_token_id]
        self.stream = np.array(stream, dtype=np.int64)
        self.plain_tokens = range(tokenizer.eos_token_id + 1, len(tokenizer))
        self.digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]

    def batch(self, step: int, scale: float) -> Batch:
        """Return the batch of a step."""
        stage, progress = locate(step, scale)
        rng = random.Random(f"{self.seed}/{step}")
        if stage.name == "mix":
            length = rng.choices(tuple(MIX_LENGTHS), tuple(MIX_LENGTHS.values()))[0]
        else:
            # Constant at first, for copying must form before contexts grow, then doubling up to the trained length.
            length = min(TRAINED_LENGTH, int(stage.first_length * 2 ** max(0.0, 8 * progress - 3) / 32) * 32)
        rows = max(1, self.tokens_scale * stage.tokens_per_step // length)
        if stage.name == "repeat":
            kinds = ["repeat"] * rows
        elif stage.name == "recall":
            kinds = rng.choices(("repeat", "pairs", "task"), (0.1, 0.3, 0.6), k=rows)
        else:
            # Shares hold in every batch as nearly as its rows allow: the loss is less noisy than with free draws.
            text = round(rows * (TEXT_SHARE if length == TRAINED_LENGTH else LONG_TEXT_SHARE))
            kinds = ["text"] * text
            kinds += rng.choices(("repeat", "pairs", "numbers", "task"), (0.1, 0.1, 0.15, 0.3), k=rows - text)
        drawn = [(kind == "text", *getattr(self, f"_{kind}_row")(length, rng)) for kind in kinds]
        leaps = stage.name != "repeat" and length <= TRAINED_LENGTH
        positions = [self._positions(length, rng if leaps and rng.random() < LEAPING_SHARE else None) for _ in kinds]
        return self._collate(drawn, torch.tensor(positions))

    @staticmethod
    def _positions(length: int, rng: random.Random | None) -> list[int]:
        """Return a row's positions, which leap now and then where there is an `rng`.

        A short row that leaps has distances of a long context, and trains the rotation for them at a fraction of what
        one costs: "PoSE", Zhu et al. 2024, https://arxiv.org/abs/2309.10400.
        """
        if rng is None:
            return list(range(length))
        # Spans are drawn by their logarithm, so that each doubling is as frequent as the others.
        spare = round(length * (LONGEST_LENGTH / length) ** rng.random()) - length
        cuts = sorted(rng.sample(range(1, length), rng.randint(1, MOST_LEAPS)))
        ends = [*sorted(rng.randint(0, spare) for _ in cuts[1:]), spare]
        leaps = dict(zip(cuts, ends, strict=True))
        ahead, positions = 0, []
        for place in range(length):
            ahead = leaps.get(place, ahead)
            positions.append(place + ahead)
        return positions

    def _collate(self, rows: Sequence[tuple[bool, list[int], list[bool]]], positions: Tensor) -> Batch:
        ids = torch.full(positions.shape, self.tokenizer.pad_token_id)
        weights = torch.zeros(positions.shape)
        for i, (_, row, asked) in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            weights[i, : len(row)] = torch.tensor(asked, dtype=torch.float32)
        is_text = torch.tensor([text for text, _, _ in rows])[:, None]
        # Rows with answers count alike, however many tokens they ask for: a row of repetition asks for hundreds, a
        # pass key for eight, and a mean over tokens would learn the first and forget the second.
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1.0)
        answer_weight = ANSWER_WEIGHT if bool(is_text.any()) else 1.0
        scale = torch.where(is_text, 1.0 / max(1, int(is_text.sum())), answer_weight / max(1, int((~is_text).sum())))
        weights = weights * scale
        return Batch(ids, positions, weights)

    def _text_row(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]]:
        start = rng.randrange(len(self.stream) - length)
        row = self.stream[start : start + length].tolist()
        row[0] = self.tokenizer.bos_token_id
        return row, [False] + [True] * (length - 1)

    def _repeat_row(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]]:
        """Return a random segment over and over; out of few tokens, more than one must match to find its place."""
        period = rng.randint(4, length // 2)
        few = rng.sample(self.plain_tokens, rng.choice((4, 16, 64, 256)))
        tokens = rng.choices((self.plain_tokens, few, self.digits), (0.5, 0.35, 0.15))[0]
        segment = rng.choices(tokens, k=period)
        row = [self.tokenizer.bos_token_id, *segment * (length // period + 1)][:length]
        return row, [i > period for i in range(length)]

    def _pairs_row(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]]:
        """Return keys of 1-3 random tokens and values of 1-5, then the same pairs asked in random order.

        Half of the rows draw values from few tokens, such as the digits: where a token comes twice in a value, the one
        before does not tell what is next, and two must match, as in pass key 22878. Up to two tokens, the same in all
        pairs of a row, stand before the key, and up to two before the value.
        """
        before = rng.choices(self.plain_tokens, k=rng.randint(0, 2))
        between = rng.choices(self.plain_tokens, k=rng.randint(0, 2))
        key_size, value_size = rng.randint(1, 3), rng.randint(1, 5)
        few = self.digits if rng.random() < 0.5 else rng.sample(self.plain_tokens, rng.randint(4, 16))
        letters = self.plain_tokens if rng.random() < 0.5 else few
        width = len(before) + key_size + len(between) + value_size
        count = min(rng.randint(2, 16), (length - 1) // (2 * width))
        keys = [tuple(rng.choices(self.plain_tokens, k=key_size)) for _ in range(count)]
        pairs = {key: tuple(rng.choices(letters, k=value_size)) for key in keys}
        row = [self.tokenizer.bos_token_id]
        for key, value in pairs.items():
            row += [*before, *key, *between, *value]
        gap = rng.randint(0, max(0, length - len(row) - width * count))
        row += rng.choices(self.plain_tokens, k=gap)
        asked = [False] * len(row)
        while len(row) + width <= length:
            key = rng.choice(list(pairs))
            row += [*before, *key, *between, *pairs[key]]
            asked += [False] * (width - value_size) + [True] * value_size
        return row, asked

    def _numbers_row(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]]:
        """Return named numbers in source text, then the question for each of them.

        Half of the numbers have few digits of their own: a digit that comes twice does not tell what is next.
        """
        row, said, questions, spare = [self.tokenizer.bos_token_id], [], [], length - 1
        for name in rng.sample(["pass", *NOUNS], rng.choice((1, 1, 2, 3, 4, 8))):
            digits = rng.sample("0123456789", 10 if rng.random() < 0.5 else 3)
            value = "".join(rng.choices(digits, k=5))
            sentence = self._ids(f"The {name} key is {value}. Remember it.\n")
            question, answer = self._ids(f"What is the {name} key? The {name} key is"), self._ids(f" {value}.\n")
            left = spare - len(sentence) - len(question) - len(answer)
            if left >= 0:
                said.append(sentence)
                questions.append((question, answer))
                spare = left
        if not said:
            return self._pairs_row(length, rng)
        ends = sorted(rng.randint(0, spare) for _ in said)
        start = rng.randrange(len(self.stream) - length)
        text = self.stream[start : start + spare].tolist()
        for sentence, begin, end in zip(said, [0, *ends], ends, strict=False):
            row += [*text[begin:end], *sentence]
        row += text[ends[-1] :]
        asked = [False] * len(row)
        for question, answer in rng.sample(questions, k=len(questions)):
            row += [*question, *answer]
            asked += [False] * len(question) + [True] * len(answer)
        return row, asked

    def _task_row(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]]:
        """Return a sample of a retrieval task with its answer; of key-value recall with several questions."""
        name = rng.choices(tuple(TRAINED_TASKS), tuple(TRAINED_TASKS.values()))[0]
        pairs = rng.randint(2, max(2, min(16, length // QUESTION_TOKENS // 2 - 2)))
        task = training_task(name, pairs=pairs) if name == "kv_recall" else training_task(name)
        # The budget that a sample keeps free for generation is filled with the answer here, and with questions.
        room = QUESTION_TOKENS * pairs if name == "kv_recall" else QUESTION_TOKENS
        longest = length - room + task.max_new_tokens(self.tokenizer)
        shortest = task.min_length(self.tokenizer)
        if shortest > longest:
            return self._pairs_row(length, rng)
        depth = min(100.0, max(0.0, rng.uniform(-5, 105)))
        # The longer of two draws: lengths vary, but little of a row is left empty.
        asked_length = max(rng.randint(shortest, longest), rng.randint(shortest, longest))
        sample = task.build(self.tokenizer, asked_length, depth, rng)
        if name == "passkey" and rng.random() < 0.5:
            # Every other one has a digit twice in a row, which one in three has by chance and which is hardest to copy.
            while not any(x == y for x, y in pairwise(sample.references[0])):
                sample = task.build(self.tokenizer, asked_length, depth, rng)
        row, asked = answered(self.tokenizer, sample)
        if name == "kv_recall":
            row.pop()
            asked.pop()
            for key, value in rng.sample(sample.meta["pairs"], k=pairs):
                question = self._ids("\n" + KVRecall.question.format(key=key))
                answer = self._ids(f" {value}.")
                row += [*question, *answer]
                asked += [False] * len(question) + [True] * len(answer)
            row.append(self.tokenizer.eos_token_id)
            asked.append(True)
        return row[:length], asked[:length]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def answered(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> tuple[list[int], list[bool]]:
    """Append the answer, a full stop and EOS to a prompt; also tell which tokens the answer is."""
    answer = tokenizer(" " + ", ".join(sample.references) + ".", add_special_tokens=False)["input_ids"]
    row = [*sample.input_ids, *answer, tokenizer.eos_token_id]
    return row, [False] * len(sample.input_ids) + [True] * (len(answer) + 1)


def locate(step: int, scale: float) -> tuple[Stage, float]:
    """Return the stage of a step and how far the step lies in it, 0..1."""
    for stage in STAGES:
        steps = max(1, round(stage.steps * scale))
        if step < steps:
            return stage, step / steps
        step -= steps
    return STAGES[-1], 1.0


def total_steps(scale: float, stages: Sequence[Stage] = STAGES) -> int:
    """Return the number of steps of all stages, or of some."""
    return sum(max(1, round(stage.steps * scale)) for stage in stages)


def lr_share(step: int, scale: float) -> float:
    """Return the learning rate as a share of the stage's: constant, then a cosine over the last stage."""
    stage, progress = locate(step, scale)
    if stage is not STAGES[-1]:
        return 1.0
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the weighted sum of next-token losses in nats; the head is applied only where there is a weight."""
    # Without a mask, Transformers takes a leap of positions for the start of a packed document.
    ids, positions = batch.input_ids[:, :-1], batch.positions[:, :-1]
    outputs = model.model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
    hidden = outputs.last_hidden_state
    where = batch.weights[:, 1:] > 0
    losses = F.cross_entropy(model.lm_head(hidden[where]), batch.input_ids[:, 1:][where], reduction="none")
    return (losses * batch.weights[:, 1:][where]).sum()


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a kill at any moment leaves the old one or the new one, never half of one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@torch.no_grad()
def answer_accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    length: int,
    depth: float,
    samples: int,
    seed: int,
    **settings: Any,
) -> float:
    """Return the share of samples that greedy decoding answers token for token, up to and without the full stop.

    Every answer token is the most likely one given the true ones before it exactly when greedy decoding writes it, so
    one forward pass per sample tells.
    """
    task = get_task(name, **settings)
    right = 0
    for index in range(samples):
        sample = task.build(tokenizer, length, depth, sample_rng(seed, name, length, depth, index))
        answer = tokenizer(" " + ", ".join(sample.references), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*sample.input_ids, *answer]], device=model.device)
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, -len(answer) :]
        right += bool((model.lm_head(hidden).argmax(-1) == ids[:, -len(answer) :]).all())
    return right / samples


@torch.no_grad()
def heldout_bits_per_byte(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[str],
    length: int = TRAINED_LENGTH,
) -> float:
    """Return bits per byte over whole documents, each token scored once with at least half a window of context."""
    nll_nats, stride = 0.0, length // 2
    for document in documents:
        ids = torch.tensor(
            [
                tokenizer.bos_token_id,
                *tokenizer.backend_tokenizer.encode(document, add_special_tokens=False).ids,
            ],
            device=model.device,
        )
        scored = 1
        for start in range(0, max(1, len(ids) - stride), stride):
            window = ids[start : start + length]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            losses = F.cross_entropy(logits, window[1:], reduction="none")
            nll_nats += losses[scored - start - 1 :].sum().item()
            scored = start + len(window)
    return nll_nats / math.log(2) / sum(len(document.encode()) for document in documents)


def load_documents(split: Literal["train", "heldout"], args: argparse.Namespace) -> list[str]:
    """Return the documents of a split, or the first of them; further text is for training only."""
    documents = load_stdlib_documents(split)
    if split == "train":
        documents += further_documents(args.text)
    return documents[: args.max_documents]


def further_documents(folders: Sequence[Path]) -> list[str]:
    """Return the source text and documentation below some folders, each text once."""
    found: dict[str, None] = {}
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES):
            if path.is_file() and 0 < path.stat().st_size <= MOST_BYTES:
                found[path.read_text(errors="replace")] = None
    return list(found)


def size_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the model's size."""
    return {name: getattr(args, name) for name in ("width", "layers", "heads", "kv_heads", "head_dim", "rope_theta")}


def train(args: argparse.Namespace) -> None:
    """Train, or go on training, in the run's folder."""
    run_dir: Path = args.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    documents = load_documents("train", args)
    if not (run_dir / "tokenizer").exists():
        chosen = train_tokenizer(documents, args.seed, args.vocab_size)
        chosen.save_pretrained(run_dir / "tokenizer.tmp")
        (run_dir / "tokenizer.tmp").rename(run_dir / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run_dir / "tokenizer")
    device = torch.device(args.device)
    model = make_model(tokenizer, args.seed, **size_of(args)).to(device)
    optimizers = make_optimizers(model)
    step, tokens, elapsed_s = 0, 0, 0.0
    checkpoint = run_dir / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, tokens, elapsed_s = state["step"], state["tokens"], state["elapsed_s"]
        logger.info("resuming at step %d", step)
    data = Data(tokenizer, documents, args.seed, args.tokens_scale)
    model.train()
    started = time.monotonic() - elapsed_s
    saved_at = time.monotonic()
    last = total_steps(args.steps_scale)
    # At the start of a long context, where a small model fails first.
    glances, glance = min(20, args.samples), min(2048, max(args.lengths))

    log_path = run_dir / "log.jsonl"
    if log_path.exists():
        # Steps after the checkpoint are taken again, and logged again.
        lines = log_path.read_text().splitlines(keepends=True)
        log_path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))

    def batch_of(step: int) -> Batch:
        return data.batch(step, args.steps_scale)

    batches = DataLoader(range(step, last), batch_size=None, collate_fn=batch_of, num_workers=args.workers)
    with log_path.open("a") as log, tqdm(total=last, initial=step, unit="step") as bar:
        for drawn in batches:
            stage, _ = locate(step, args.steps_scale)
            share = lr_share(step, args.steps_scale) * min(1.0, (step + 1) / WARMUP_STEPS)
            for optimizer, lr in zip(optimizers, (stage.matrix_lr, stage.other_lr), strict=True):
                optimizer.param_groups[0]["lr"] = lr * share
            batch = Batch(drawn.input_ids.to(device), drawn.positions.to(device), drawn.weights.to(device))
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = weighted_loss(model, batch)
            if not torch.isfinite(loss):
                raise SystemExit(f"The loss is {loss.item()} at step {step}. Last good checkpoint: {checkpoint}.")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tokens += batch.input_ids.numel()
            step += 1
            bar.update()
            if step % args.log_every == 0 or step == last:
                model.eval()
                record = {
                    "step": step,
                    "stage": stage.name,
                    "length": batch.input_ids.shape[1],
                    "loss_nats": round(loss.item(), 4),
                    "lr_share": round(share, 4),
                    "tokens": tokens,
                    "elapsed_s": round(time.monotonic() - started, 1),
                    "passkey": answer_accuracy(model, tokenizer, "passkey", glance, 0, glances, args.seed + 1),
                    "kv_recall_4": answer_accuracy(
                        model, tokenizer, "kv_recall", glance, 0, glances, args.seed + 1, pairs=4
                    ),
                }
                model.train()
                log.write(json.dumps(record) + "\n")
                log.flush()
                bar.set_postfix(stage=record["stage"], loss=record["loss_nats"], passkey=record["passkey"])
            if time.monotonic() - saved_at > args.save_every_s or step == last:
                save_checkpoint(
                    checkpoint,
                    {
                        "model": model.state_dict(),
                        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                        "step": step,
                        "tokens": tokens,
                        "elapsed_s": time.monotonic() - started,
                    },
                )
                saved_at = time.monotonic()


def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the card reports, on held-out files and on samples that training never drew."""
    train_documents = load_documents("train", args)
    stdlib = load_stdlib_documents("train")
    heldout = load_documents("heldout", args)
    seed = args.seed + 1
    per_depth = math.ceil(args.samples / len(DEPTHS))
    passkey: dict[str, dict[str, float]] = {}
    kv_recall: dict[str, dict[str, float]] = {}
    for length in tqdm(args.lengths, desc="retrieval"):
        passkey[str(length)] = {
            str(depth): answer_accuracy(model, tokenizer, "passkey", length, depth, args.samples, seed)
            for depth in DEPTHS
        }
        kv_recall[str(length)] = {
            str(pairs): statistics.fmean(
                answer_accuracy(model, tokenizer, "kv_recall", length, depth, per_depth, seed, pairs=pairs)
                for depth in DEPTHS
            )
            for pairs in PAIRS
            if get_task("kv_recall", pairs=pairs).min_length(tokenizer) <= length
        }
    return {
        "bits_per_byte": heldout_bits_per_byte(model, tokenizer, heldout),
        "bits_per_byte_longest": heldout_bits_per_byte(model, tokenizer, heldout, LONGEST_LENGTH),
        "bits_per_byte_5gram": NgramModel(train_documents[: len(stdlib)], order=5).bits_per_byte(heldout),
        "heldout_bytes": sum(len(document.encode()) for document in heldout),
        "train_bytes": sum(len(document.encode()) for document in train_documents),
        "passkey_samples_per_cell": args.samples,
        "kv_recall_samples_per_cell": per_depth * len(DEPTHS),
        "passkey": passkey,
        "kv_recall": kv_recall,
    }


def table(cells: dict[str, dict[str, float]], corner: str, columns: Sequence[str], samples: int) -> str:
    """Return a Markdown table with one row per key of `cells`: shares of so many samples, and 95% intervals.

    A cell that was not measured is a dash.
    """

    def shown(share: float | None) -> str:
        if share is None:
            return "-"
        low, high = wilson_interval(share * samples, samples)
        return f"{share:.2f} ({low:.2f} - {high:.2f})"

    lines = [f"| {corner} | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for row, values in cells.items():
        lines.append(f"| {row} | {' | '.join(shown(values.get(column)) for column in columns)} |")
    return "\n".join(lines)


def write_card(path: Path, model: LlamaForCausalLM, record: dict[str, Any]) -> None:
    """Write the model card; every figure in it comes from `record` or from the model's configuration."""
    stages = ", ".join(f"{name} {count:,} steps" for name, count in record["stage_steps"].items())
    lengths = ", ".join(f"{length:,} ({share:.0%})" for length, share in MIX_LENGTHS.items())
    config = model.config
    path.write_text(
        f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# A small teacher for linear-attention distillation

A softmax Llama of {record["parameters"]:,} parameters: {config.num_hidden_layers} layers, width {config.hidden_size},
{config.num_attention_heads} query heads and {config.num_key_value_heads} key/value heads of {config.head_dim}, a
rotation of base {record["rope_theta"]:,.0f}, tied embeddings, a byte-level BPE vocabulary of
{config.vocab_size} tokens in which every digit is a token. It reads Python
source and answers recall questions. It is there to be distilled and evaluated in minutes on a CPU, and is good for
nothing else. Written by `examples/train_teacher.py`, figures included.

## Training

Stages: {stages}; {record["tokens"]:,} tokens in {record["elapsed_s"] / 60:.0f} minutes with {record["device"]}.
Contexts of the last stage, in tokens, and their share of its batches: {lengths}. Of the rows
of {TRAINED_LENGTH} tokens {LEAPING_SHARE:.0%} leap ahead in their positions, so that their distances reach
{LONGEST_LENGTH:,}.
Text: the standard library of Python {record["python"]} without tests and tables{record["further"]},
{record["train_bytes"]:,} bytes.
Recall: generated samples of {", ".join(TRAINED_TASKS)}, key-value pairs of random tokens, and repeated random
segments.
{f"{chr(10)}{record['remark']}{chr(10)}" if record["remark"] else ""}
## Held-out text

{record["heldout_bytes"]:,} bytes of standard-library files that were not trained on:

| model | bits per byte |
| --- | --- |
| this one, windows of {TRAINED_LENGTH} tokens | {record["bits_per_byte"]:.3f} |
| this one, windows of {LONGEST_LENGTH} tokens | {record["bits_per_byte_longest"]:.3f} |
| byte 5-gram, interpolated Kneser-Ney, the standard library's training files | {record["bits_per_byte_5gram"]:.3f} |

## Retrieval

Share of samples whose answer greedy decoding writes token for token, and its 95% interval; none is from training.

Passkey, by length in tokens (rows) and depth in percent (columns), {record["passkey_samples_per_cell"]} samples per
cell:

{table(record["passkey"], "length", [str(depth) for depth in DEPTHS], record["passkey_samples_per_cell"])}

Key-value recall, by length in tokens (rows) and number of pairs (columns), {record["kv_recall_samples_per_cell"]}
samples per cell, spread over the same depths:

{table(record["kv_recall"], "length", [str(pairs) for pairs in PAIRS], record["kv_recall_samples_per_cell"])}

## Limits

It has seen Python code and a handful of sentence patterns, nothing else. No context beyond {LONGEST_LENGTH} tokens was
trained.
"""
    )


def export(args: argparse.Namespace) -> None:
    """Measure the last checkpoint and write it, its log and its card to the output folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.run_dir / "tokenizer")
    state = torch.load(args.run_dir / "checkpoint.pt", weights_only=True, map_location="cpu")
    model = make_model(tokenizer, args.seed, **size_of(args))
    model.load_state_dict(state["model"])
    model.to(args.device).eval()
    log = [json.loads(line) for line in (args.run_dir / "log.jsonl").read_text().splitlines()]
    stage_steps = Counter(locate(step, args.steps_scale)[0].name for step in range(state["step"]))
    record = {
        "step": state["step"],
        "stage_steps": dict(stage_steps),
        "tokens": state["tokens"],
        "elapsed_s": round(state["elapsed_s"], 1),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} CPU thread(s)",
        "python": platform.python_version(),
        "further": ", and installed packages" if args.text else "",
        "remark": args.remark,
        "rope_theta": args.rope_theta,
        "parameters": sum(p.numel() for p in model.parameters()),
        **measure(model, tokenizer, args),
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    lines = [json.dumps(line) for line in [*log[:: len(log) // LOG_LINES + 1], record]]
    (args.output_dir / "training_log.jsonl").write_text("\n".join(lines) + "\n")
    write_card(args.output_dir / "README.md", model, record)
    logger.info("wrote %s: %.3f bits per byte", args.output_dir, record["bits_per_byte"])


def main() -> None:
    """Parse, train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs/teacher"), help="checkpoint and log; default %(default)s")
    add(
        "--output-dir",
        type=Path,
        default=Path(__file__).parent / "teacher",
        help="where the finished model goes; default: the folder teacher beside this script",
    )
    add("--export-only", action="store_true", help="do not train, only measure and write the last checkpoint")
    add("--steps-scale", type=float, default=1.0, help="multiply the steps of every stage; default %(default)s")
    add("--max-documents", type=int, help="use only so many files of each split; default all")
    add("--samples", type=int, default=50, help="samples of every measured cell; default %(default)s")
    add("--lengths", type=int, nargs="+", default=LENGTHS, help="measured context lengths; default %(default)s")
    add("--seed", type=int, default=0, help="of weights, batches and samples; default %(default)s")
    add("--width", type=int, default=128, help="hidden size; default %(default)s")
    add("--layers", type=int, default=4, help="default %(default)s")
    add("--heads", type=int, default=4, help="query heads; default %(default)s")
    add("--kv-heads", type=int, default=2, help="key/value heads; default %(default)s")
    add("--head-dim", type=int, default=64, help="of a head; default %(default)s")
    add("--rope-theta", type=float, default=500_000.0, help="base of the rotation; default %(default)s")
    add("--vocab-size", type=int, default=1024, help="default %(default)s")
    add("--tokens-scale", type=int, default=1, help="multiply the tokens of every step; default %(default)s")
    add("--text", type=Path, nargs="+", default=[], help="folders with further source text to train on")
    add("--device", default="cpu", help="cpu or cuda; default %(default)s")
    add("--bf16", action="store_true", help="forwards in bf16, which a CPU should have instructions for")
    add("--workers", type=int, default=0, help="processes that prepare batches; default %(default)s")
    add("--threads", type=int, default=1, help="CPU threads; default %(default)s")
    add("--log-every", type=int, default=100, help="steps between log lines; default %(default)s")
    add("--remark", help="a paragraph for the card: what was different about this run, such as a change on the way")
    add("--save-every-s", type=float, default=60.0, help="seconds between checkpoints; default %(default)s")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    if not args.export_only:
        train(args)
    export(args)


if __name__ == "__main__":
    main()
