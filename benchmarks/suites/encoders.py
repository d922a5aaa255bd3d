"""Encoders: embeddings after patching and after distillation against the teacher's, padding, and speed by length.

    python benchmarks/run.py --suite encoders --output docs/results/encoders.json

The teacher is a BERT of 6 layers, trained here on the source text of Python's standard library: masked tokens, halves
of a text that belong together, and repeated pieces, so that it has something to look up. Students are made from it by
the preset `encoder`. Every step is kept in `--work-dir`; the same command goes on where it was stopped.
"""

import argparse
import copy
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import break_even, facts_line, markdown, once, provenance, replace_text, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.bert.modeling_bert import BertSelfAttention

from hf_linear_attn import patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.data import Data, load_data
from hf_linear_attn.distill.measure import measure_encoders
from hf_linear_attn.encoders import Frame, Pooling, embed
from hf_linear_attn.evaluation.embedding import embed_all
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.feature_maps import feature_map_class
from hf_linear_attn.loading import load_model, load_tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP, MASK = 0, 2, 3, 4
POSITIONS = 8192
PAIRS = 8
"""Texts of a training step of which both halves are read; beside them so many repeated pieces."""
PIECE = (6, 40)
"""Fewest and most tokens of a piece."""
MASKED = 0.2
SHARPNESS = 1.2
"""Standard deviation of queries and keys at the teacher's start; that of scores is its square times the root of 32."""
TEMPERATURE = 0.2
POOLING = Pooling(("mean",))
MAPS = ("norm_preserving", "elu", "hedgehog")


def parser() -> argparse.ArgumentParser:
    """Return the suite's arguments."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--train-steps", type=int, default=500, help="of the teacher (%(default)s)")
    found.add_argument("--width", type=int, default=64, help="of the teacher, whose heads have 32 (%(default)s)")
    found.add_argument("--vocabulary", type=int, default=512, help="(%(default)s)")
    found.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the students (0 1 2)")
    found.add_argument("--texts", type=int, default=256, help="held-out texts (%(default)s)")
    found.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    found.add_argument("--repeats", type=int, default=5, help="timed forwards per length (%(default)s)")
    found.add_argument("--settings", type=json.loads, default={}, help="changes of the preset, a JSON object")
    found.add_argument(
        "--work-dir", type=Path, default=Path("runs/encoders"), help="where steps are kept (%(default)s)"
    )
    found.add_argument("--output", type=Path, required=True, help="result, a JSON file; its page lies beside it")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    arguments = parser().parse_args(argv)
    torch.set_num_threads(1)
    folder = arguments.work_dir / f"teacher-{arguments.width}-{arguments.vocabulary}-{arguments.train_steps}"
    if not (folder / "config.json").exists():
        train_teacher(arguments, folder)
    teacher = load_model(str(folder), kind="encoder").eval()
    tokenizer = load_tokenizer(str(folder))
    settings = settings_of(arguments, folder, 0)
    heldout = load_data(settings, tokenizer)[1]

    def kept(key: str, make: Callable[[], Any]) -> Any:
        return once(folder / f"{key}.json", make)

    def figures(model: PreTrainedModel) -> dict[str, Any]:
        lengths = [factor * settings.block_tokens for factor in settings.factors()]
        both = {"teacher": teacher, "student": model.eval()}
        return measure_encoders(both, heldout, tokenizer, POOLING, rows=arguments.texts, lengths=lengths)

    students: dict[str, Any] = {}
    for name in MAPS:
        students[f"{name}, patched"] = [kept(f"patched-{name}", lambda name=name: figures(patched(teacher, name)))]
    for name in MAPS:
        runs = students[f"{name}, distilled"] = []
        for seed in arguments.seeds if name == MAPS[0] else arguments.seeds[:1]:
            key = f"distilled-{name}-{seed}"
            made = settings_of(arguments, folder, seed).with_changes(feature_map=name)
            if not feature_map_class(name).learned:
                # What has nothing that transfer could train gets those steps as distillation.
                steps = made.transfer_steps + made.distill_steps
                made = made.with_changes(stages=["embed"], distill_steps=steps)
            runs.append(kept(key, lambda made=made: distilled(made, teacher, tokenizer, figures, heldout)))
    result = {
        "provenance": provenance("encoders", list(sys.argv[1:] if argv is None else argv))
        | {"teacher": json.loads((folder / "training.json").read_text()), "distillation": settings.to_dict()},
        "students": students,
        "speed": kept("speed", lambda: speed(teacher, arguments.lengths, arguments.repeats)),
    }
    write(arguments.output, result, page(result))


def settings_of(arguments: argparse.Namespace, folder: Path, seed: int) -> DistillationSettings:
    """Return the distillation of one student."""
    given = {"model": str(folder), "heldout_rows": arguments.texts, "progress": False, "seed": seed}
    return DistillationSettings.from_preset("encoder", **(given | arguments.settings))


def patched(teacher: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a patched copy of the teacher."""
    return patch_model(copy.deepcopy(teacher), feature_map=name)


def distilled(
    settings: DistillationSettings,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    figures: Callable[[PreTrainedModel], dict[str, Any]],
    heldout: Data,
) -> dict[str, Any]:
    """Distil a student; return its figures, what padding does to it, and how much it read."""
    started = time.process_time()
    result = distill(settings.with_changes(heldout_rows=0), teacher, tokenizer=tokenizer)
    cost = {"tokens": result.tokens, "cpu_s": time.process_time() - started}
    return figures(result.student) | {"padding": padding(result.student, tokenizer, heldout), "cost": cost}


def padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, heldout: Data) -> float:
    """Return the largest difference between embeddings of texts that are padded and alone."""
    frame = Frame.of(tokenizer)
    texts = [heldout.text_row(n, 16 + 7 * n).input_ids[1:-1] for n in range(16)]
    together = embed_all(model, texts, frame, POOLING, pad=PAD, batch=16)
    alone = embed_all(model, texts, frame, POOLING, pad=PAD, batch=1)
    return (together - alone).abs().max().item()


@torch.no_grad()
def speed(teacher: PreTrainedModel, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the CPU time of a text's embedding by length, teacher and patched models in turn, in milliseconds."""
    encoders = {"softmax": teacher} | {name: patched(teacher, name).eval() for name in MAPS}
    found: dict[str, list[float]] = {name: [] for name in encoders}
    for length in lengths:
        ids = torch.randint(len(SPECIAL), teacher.config.vocab_size, (1, length), generator=torch.Generator())
        times: dict[str, list[float]] = {name: [] for name in encoders}
        for number in range(repeats + 1):
            for name, model in encoders.items():
                started = time.process_time()
                embed(model, ids, torch.ones_like(ids, dtype=torch.bool), POOLING)
                if number:
                    times[name].append(1e3 * (time.process_time() - started))
        for name, taken in times.items():
            found[name].append(statistics.median(taken))
    return {"lengths": list(lengths), "cpu_ms": found, "threads": torch.get_num_threads()}


def train_teacher(arguments: argparse.Namespace, folder: Path) -> None:
    """Train the teacher and its tokenizer, and save both."""
    torch.manual_seed(0)
    rng = random.Random(0)
    documents = load_stdlib_documents("train")
    tokenizer = train_tokenizer(rng.sample(documents, 200), arguments.vocabulary)
    encoded = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in documents]
    encoded = [ids for ids in encoded if len(ids) > 4 * PIECE[1]]
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=arguments.width,
            num_hidden_layers=6,
            num_attention_heads=arguments.width // 32,
            intermediate_size=4 * arguments.width,
            max_position_embeddings=POSITIONS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    for module in model.modules():
        # Attention that is nearly even, as at BERT's own start, could be patched at no loss; what was trained long not.
        if isinstance(module, BertSelfAttention):
            for projection in (module.query, module.key):
                nn.init.normal_(projection.weight, std=SHARPNESS / math.sqrt(arguments.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    log: list[dict[str, float]] = []
    started = time.process_time()
    for step in range(arguments.train_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * (1 - step / arguments.train_steps)
        masked, paired = losses(model, list(pieces(encoded, rng)))
        (masked + paired).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == arguments.train_steps:
            log.append({"step": step + 1, "masked_nats": masked.item(), "paired_nats": paired.item()})
            print(log[-1], f"{time.process_time() - started:.0f} s of CPU time", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"layers": 6, "width": arguments.width, "vocabulary": len(tokenizer), "steps": arguments.train_steps}
    replace_text(folder / "training.json", json.dumps({**facts, **log[-1], "cpu_s": time.process_time() - started}))


def train_tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with BERT's special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **names)


def pieces(documents: Sequence[Sequence[int]], rng: random.Random) -> Iterator[list[int]]:
    """Yield texts of a step: pairs of neighbouring pieces, first all first halves, and pieces that come twice."""
    halves: tuple[list[list[int]], list[list[int]]] = [], []
    for _ in range(PAIRS):
        document = rng.choice(documents)
        first, second = (int(math.exp(rng.uniform(*map(math.log, PIECE)))) for _ in range(2))
        start = rng.randrange(len(document) - first - second)
        halves[0].append(list(document[start : start + first]))
        halves[1].append(list(document[start + first : start + first + second]))
    yield from halves[0] + halves[1]
    for _ in range(2 * PAIRS):
        document = rng.choice(documents)
        size = rng.randint(8, PIECE[1] // 2)
        start = rng.randrange(len(document) - size)
        yield 2 * list(document[start : start + size])


def losses(model: BertForMaskedLM, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return nats per masked token, and nats of finding each text's neighbour among those of the step."""
    width = max(map(len, texts)) + 2
    ids = torch.tensor([[CLS, *text, SEP] + [PAD] * (width - 2 - len(text)) for text in texts])
    real = ids != PAD
    hidden = (torch.rand(ids.shape) < MASKED) & (ids >= len(SPECIAL))
    states = model.bert(input_ids=ids.masked_fill(hidden, MASK), attention_mask=real.long()).last_hidden_state
    masked = F.cross_entropy(model.cls(states[hidden]), ids[hidden])
    embeddings = F.normalize(POOLING(states[: 2 * PAIRS], real[: 2 * PAIRS]), dim=-1)
    scores = embeddings[:PAIRS] @ embeddings[PAIRS:].T / TEMPERATURE
    return masked, F.cross_entropy(scores, torch.arange(PAIRS))


def page(result: dict[str, Any]) -> str:
    """Return the page of the results."""
    rows, times = [], result["speed"]
    teacher = next(iter(result["students"].values()))[0]["teacher"]
    for name, runs in result["students"].items():
        students = [run["student"] for run in runs]

        def mean(key: str, students: list[dict[str, float]] = students) -> float:
            return statistics.mean(student[key] for student in students)

        rows.append(
            {
                "student": name,
                "mean cosine": f"{mean('cosine_mean'):.4f}",
                "worst 5%": f"{mean('cosine_p05'):.4f}",
                "least": f"{mean('cosine_min'):.4f}",
                "reciprocal rank": f"{mean('mean_reciprocal_rank'):.3f}",
                "found first": f"{mean('top1'):.3f}",
                "seeds": len(runs),
            }
        )
    own = {"student": "teacher", "mean cosine": "1", "worst 5%": "1", "least": "1"}
    own |= {"reciprocal rank": f"{teacher['mean_reciprocal_rank']:.3f}", "found first": f"{teacher['top1']:.3f}"}
    speeds = [
        {"tokens": length, **{name: f"{taken[n]:.1f}" for name, taken in times["cpu_ms"].items()}}
        for n, length in enumerate(times["lengths"])
    ]
    softmax = times["cpu_ms"]["softmax"]
    from_where = {name: break_even(times["lengths"], times["cpu_ms"][name], softmax) for name in MAPS}
    faster = "; ".join(
        f"{name} from {at:.0f} tokens on" if at else f"{name} not up to {times['lengths'][-1]}"
        for name, at in from_where.items()
    )
    best = result["students"][f"{MAPS[0]}, distilled"]
    facts = result["provenance"]["teacher"]
    return TEXT.format(
        **facts,
        rows=markdown([own, *rows]),
        speeds=markdown(speeds),
        faster=faster,
        between=best[0]["student"]["between_texts"],
        texts=best[0]["student"]["texts"],
        tokens=best[0]["cost"]["tokens"],
        seconds=statistics.mean(run["cost"]["cpu_s"] for run in best),
        padding=max(run["padding"] for run in best),
        made=facts_line(result["provenance"]),
    )


TEXT = """\
# Encoders

A BERT of {layers} layers, width {width} and {vocabulary} tokens, trained for {steps} steps on the source text of
Python's standard library ({masked_nats:.2f} nats per masked token, {paired_nats:.2f} to find the neighbour of a piece
among 8), and students of it: merely patched, and distilled with the preset `encoder` on {tokens:,} tokens, which took
{seconds:.0f} s of one CPU core.

On {texts} held-out texts of 32 to 256 tokens: the cosine of a text's embedding to the teacher's, its mean, its lowest
5% and its least; and how well the first half of a text finds its second half among all. The teacher's embeddings of
different texts have a mean cosine of {between:.3f}.

{rows}
Padded in one batch and alone, a distilled student's embeddings differ by at most {padding:.1e} in any number.

## Speed

Milliseconds of CPU time for one text's embedding, one thread, fp32, teacher and students in turn; the teacher computes
attention as torch's `scaled_dot_product_attention` does. Faster than softmax: {faster}.

{speeds}
{made}"""


if __name__ == "__main__":
    main()
