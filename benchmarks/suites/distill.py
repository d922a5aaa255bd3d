"""Distillation recipes on one teacher: same tokens, same seeds, one factor changed at a time.

    python benchmarks/run.py --suite distill --output docs/results/distillation.json

The recommended recipe is compared with a window alone of equal cache bytes, with LoLCATs' recipe and with itself where
one thing is different, or where state and window share its cache's bytes otherwise. Finished runs are kept in
``--work-dir`` and not repeated, and an unfinished one goes on from its checkpoint. ``--report`` writes the page
docs/results/distillation.md from a result.
"""

import argparse
import copy
import functools
import hashlib
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import Parser, gap_closed, once, provenance
from transformers import PreTrainedModel

from hf_linear_attn import from_pretrained
from hf_linear_attn.distill import Data, DistillationSettings, distill, load_data, measure
from hf_linear_attn.distill.baseline import equal_cache_window
from hf_linear_attn.distill.forward import predictions
from hf_linear_attn.distill.measure import FACTORS, MAX_DEPTH, heldout_loss, measure_answers, recall_accuracy, shown
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.loading import load_model, load_tokenizer

ELU = {"feature_map": "elu", "window": None, "sinks": 0, "window_dropout": 0.0}
SPLITS: dict[str, dict[str, Any]] = {
    "64 features, window 94": {"feature_map_options": {"num_features": 64}, "window": 94},
    "64 features, window 94, decay": {
        "feature_map_options": {"num_features": 64},
        "window": 94,
        "update_rule": "decay",
    },
    "32 features, window 109": {"feature_map_options": {"num_features": 32}, "window": 109},
}
"""The bytes of the recommended recipe's cache of the examples' teacher, otherwise divided: less state, more window."""
CHANGES: dict[str, dict[str, Any]] = {
    "recommended": {},
    **SPLITS,
    "rotation kept": {"rotary": "keep"},
    "256 features": {"feature_map_options": {"num_features": 256}},
    "decay": {"update_rule": "decay"},
    "decay, one length": {"update_rule": "decay", "length_factors": [1]},
    "decay, calibrated": {"update_rule": "decay", "calibration_batches": 4},
    "delta": {"update_rule": "delta"},
    "gated delta": {"update_rule": "gated_delta"},
    "gated delta, calibrated": {"update_rule": "gated_delta", "calibration_batches": 4},
    "window dropout": {"window_dropout": 0.5},
    "no sinks": {"sinks": 0},
    "no window": {"window": None, "sinks": 0, "window_dropout": 0.0},
    "gate for key": {"mix": "gate"},
    "shared denominator": {"mix": "shared", "window_dropout": 0.0},
    "one length": {"length_factors": [1]},
    "two lengths": {"length_factors": [1, 2]},
    "no transfer": {"stages": ["distill"]},
    "transfer by attention weights": {"transfer_loss": "weights"},
    "cross-entropy for KL": {"distill_loss": "ce"},
    "LoRA for all weights": {"trainable": "lora"},
    "frozen feature maps": {"train_feature_maps": False},
    "text only": {"recall_share": 0.0},
    "answers weigh ten times": {"answer_weight": 10.0},
    "hedgehog features": {"feature_map": "hedgehog"},
    "elu with window": {"feature_map": "elu", "stages": ["distill"]},
    "elu alone": {**ELU, "stages": ["distill"]},
}
ELU_LONG = "elu preset, one length, 7 times the tokens"
"""Where attention is learned anew, which takes longer."""
LONGER = 4
"""At so many times the length of a sequence students are measured as well."""
WINDOW, LOLCATS = "window alone", "lolcats"
WINDOW_TEXT = "window alone, text only"
LARGER = "256 features"
WINDOW_LARGER = f"window alone, of the bytes of {LARGER}"
WINDOWS = {WINDOW: "recommended", WINDOW_TEXT: "recommended", WINDOW_LARGER: LARGER}
"""Windows alone, and the recipe whose cache each is as large as."""
NAMES = (WINDOW, LOLCATS, *CHANGES, WINDOW_TEXT, WINDOW_LARGER, ELU_LONG)


def parser() -> Parser:
    """Return the suite's arguments."""
    found = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--teacher", default="examples/teacher", help="softmax checkpoint (%(default)s)")
    found.add_argument("--recipes", nargs="+", choices=NAMES, default=NAMES, help="all by default")
    found.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (0 1 2)")
    found.add_argument("--transfer-steps", type=int, default=100, help="steps of attention transfer (%(default)s)")
    found.add_argument("--distill-steps", type=int, default=500, help="steps of logit distillation (%(default)s)")
    found.add_argument("--rows", type=int, default=4, help="sequences of a step (%(default)s)")
    found.add_argument("--block-tokens", type=int, default=512, help="tokens of a sequence (%(default)s)")
    found.add_argument("--window", type=int, default=64, help="window of the recipes that have one (%(default)s)")
    found.add_argument("--mixed-precision", choices=("auto", "no", "bf16"), default="auto", help="of training (auto)")
    found.add_argument("--heldout-rows", type=int, default=32, help="held-out text sequences (%(default)s)")
    found.add_argument("--samples", type=int, default=100, help="recall samples per number of pairs (%(default)s)")
    found.add_argument(
        "--recall-factors",
        type=int,
        nargs="+",
        default=[],
        help="multiples of a sequence at which recall is measured",
    )
    found.add_argument(
        "--answer-samples",
        type=int,
        default=20,
        help="questions per task and length, and per seed, that are answered in writing; 0 for none (%(default)s)",
    )
    found.add_argument("--work-dir", type=Path, default=Path("runs/distill-study"), help="runs (%(default)s)")
    found.add_argument("--finished-only", action="store_true", help="train nothing, write what is finished")
    found.add_argument("--output", type=Path, required=True, help="result, a JSON file")
    found.add_argument("--report", type=Path, help="page to write from the result, Markdown")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    arguments = parser().parse_args(argv)
    teacher = load_model(arguments.teacher, "--teacher", attention="softmax", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(arguments.teacher)

    recommended = settings_of(arguments, "recommended", 0, 1)

    @cache
    def data_of(seed: int, recall_share: float, answer_weight: float) -> tuple[Data, Data]:
        base = settings_of(arguments, "recommended", seed, 1)
        return load_data(base.with_changes(recall_share=recall_share, answer_weight=answer_weight), tokenizer)

    def figures(model: PreTrainedModel) -> dict[str, Any]:
        # Held-out text and questions are those of one seed and one mixture for all runs.
        heldout = data_of(0, recommended.recall_share, recommended.answer_weight)[1]
        length = arguments.block_tokens
        questions: dict[str, Any] = {"seed": 1000, "samples": arguments.samples}
        found = measure(model, heldout, tokenizer, rows=arguments.heldout_rows, length=length, **questions)
        found["mix"] = mixed_loss(model, heldout, arguments.heldout_rows, length, window)
        found["longer"] = heldout_loss(model, heldout, max(1, arguments.heldout_rows // LONGER), LONGER * length)
        found["longer"]["recall"] = {"4": recall_at(model, LONGER, questions)}
        found["recall_at"] = {str(factor): recall_at(model, factor, questions) for factor in arguments.recall_factors}
        return found

    def written(model: PreTrainedModel) -> list[dict[str, Any]]:
        return measure_answers(
            model, tokenizer, length=arguments.block_tokens, samples=arguments.answer_samples, seed=1000
        )

    def recall_at(model: PreTrainedModel, factor: int, questions: dict[str, Any]) -> float | None:
        length = factor * arguments.block_tokens
        return recall_accuracy(model, tokenizer, pairs=4, length=length, max_depth=MAX_DEPTH, **questions)

    @cache
    def window_of(name: str) -> int:
        return equal_cache_window(patched(teacher, settings_of(arguments, WINDOWS.get(name, "recommended"), 0, 1)))

    window = window_of("recommended")
    if window >= arguments.block_tokens:
        parser().error(f"--block-tokens must be more than {window}, the window of equal cache bytes")
    digest = hashlib.sha256(b"".join(x.numpy().tobytes() for _, x in sorted(teacher.state_dict().items())))
    # Where Accelerate trains.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    teacher.to(device)
    measured_on = [arguments.heldout_rows, arguments.samples, arguments.recall_factors]
    recipe = hashlib.sha256(
        json.dumps([digest.hexdigest(), recommended.to_dict(), *measured_on], sort_keys=True).encode()
    ).hexdigest()[:12]
    folder = arguments.work_dir / recipe
    folder.mkdir(parents=True, exist_ok=True)

    def path_of(key: str) -> Path:
        return folder / f"{key.replace(' ', '-')}.json"

    asked_for = [f"{name} {seed}" for seed in arguments.seeds for name in arguments.recipes]
    if arguments.finished_only and not any(path_of(key).exists() for key in asked_for):
        parser().error(
            f"--finished-only: {folder} holds no finished run of these recipes and seeds; run some without it"
        )

    def kept(key: str, make: Any) -> Any:
        return once(path_of(key), make)

    def settings_with_folder(name: str, seed: int) -> DistillationSettings:
        settings = settings_of(arguments, name, seed, window_of(name))
        return settings.with_changes(output_dir=str(folder / f"run-{name.replace(' ', '-')}-{seed}"), progress=True)

    def run(name: str, seed: int) -> dict[str, Any]:
        settings = settings_with_folder(name, seed)
        result = distill(
            settings,
            teacher=teacher,
            tokenizer=tokenizer,
            data=data_of(seed, settings.recall_share, settings.answer_weight),
        )
        return {
            "tokens": result.tokens,
            "elapsed_s": result.elapsed_s,
            "history": result.history,
            "trainable_parameters": result.trainable_parameters,
        }

    def student_of(name: str, seed: int) -> PreTrainedModel:
        student = from_pretrained(settings_with_folder(name, seed).output_dir or "")
        return student.to(device).eval()

    asked = arguments.answer_samples

    results: dict[str, Any] = {
        "provenance": provenance("distill", list(map(shlex.quote, argv or [])))
        | {
            "teacher": str(arguments.teacher),
            "teacher_sha256": digest.hexdigest(),
            "seeds": arguments.seeds,
            "samples": arguments.samples,
            "answer_samples": asked,
            "equal_cache_window": window,
            "recommended": recommended.to_dict(),
        },
        "teacher": kept("teacher", lambda: figures(teacher)),
        "answers": {"teacher": kept(f"answers {asked} teacher", lambda: written(teacher)) if asked else []},
        "patched": {},
        "recipes": {},
    }
    # Seed by seed, so that an interrupted suite has measured all recipes alike.
    for seed in arguments.seeds:
        for name in arguments.recipes:
            key = f"{name} {seed}"
            if arguments.finished_only and not path_of(key).exists():
                continue
            start = settings_of(arguments, name, 0, window_of(name))
            results["patched"][name] = kept(f"patched {name}", lambda start=start: figures(patched(teacher, start)))
            found = kept(key, lambda name=name, seed=seed: run(name, seed))
            found["figures"] = kept(f"figures {key}", lambda name=name, seed=seed: figures(student_of(name, seed)))
            if asked:
                # In a file of its own, so that asking more or fewer questions measures nothing else anew.
                found["answers"] = kept(
                    f"answers {asked} {key}", lambda name=name, seed=seed: written(student_of(name, seed))
                )
            results["recipes"].setdefault(name, {})[str(seed)] = found
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(*_answers(results), sep="\n")
    if arguments.report is not None:
        drawn = arguments.report.with_suffix(".svg")
        arguments.report.write_text(report(results, drawn.name))
        picture(results, drawn)


@torch.no_grad()
def mixed_loss(model: PreTrainedModel, data: Data, rows: int, length: int, first: int) -> dict[str, float]:
    """Measure the loss on held-out sequences as they are trained on, text and recall, beyond the first tokens.

    Args:
        model: A causal language model.
        data: Held-out data.
        rows: Number of sequences.
        length: Their tokens.
        first: First position that counts.

    Returns:
        ``loss_nats`` per token, answers and text counting alike, and ``answer_nats`` per token of the answers.
    """
    recalls = round(rows * data.recall_share)
    kinds = {
        "text": [data.text_row(number, length) for number in range(rows - recalls)],
        "answers": [data.recall_row(number, length) for number in range(recalls)],
    }
    nats: dict[str, float] = {}
    tokens: dict[str, float] = {}
    for kind, found in kinds.items():
        nats[kind] = tokens[kind] = 0.0
        for row in found:
            batch = data.collate([row], length).to(model.device)
            targets, _, logits = predictions(model, batch)
            beyond = (batch.weights[0, 1:] > 0).nonzero()[:, 0] + 1 >= first
            loss = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
            nats[kind] += loss[beyond].sum().item()
            tokens[kind] += int(beyond.sum())
    return {
        "loss_nats": sum(nats.values()) / sum(tokens.values()),
        "answer_nats": nats["answers"] / tokens["answers"],
    }


def settings_of(arguments: argparse.Namespace, name: str, seed: int, window: int) -> DistillationSettings:
    """Return the settings of one recipe; all read the same number of tokens."""
    common: dict[str, Any] = {
        "window": arguments.window,
        "transfer_steps": arguments.transfer_steps,
        "distill_steps": arguments.distill_steps,
        "rows": arguments.rows,
        "block_tokens": arguments.block_tokens,
        "mixed_precision": arguments.mixed_precision,
        "heldout_rows": 0,
        "checkpoint_every": 20,
        "progress": False,
        "seed": seed,
    }
    if name == LOLCATS:
        settings = DistillationSettings.from_preset("lolcats", **common)
    elif name == ELU_LONG:
        longer = {"window": None, "length_factors": [1], "distill_steps": 7 * arguments.distill_steps}
        longer["transfer_steps"] = 7 * arguments.transfer_steps
        settings = DistillationSettings.from_preset("elu", **(common | longer))
    elif name in WINDOWS:
        changes = {"mix": "window", "window": window, "window_dropout": 0.0, "stages": ["distill"]}
        if name == WINDOW_TEXT:
            changes["recall_share"] = 0.0
        settings = DistillationSettings(**(common | changes))
    else:
        settings = DistillationSettings(**(common | CHANGES[name]))
    if "transfer" not in settings.stages:
        settings = settings.with_changes(distill_steps=settings.transfer_steps + settings.distill_steps)
    return settings


def patched(teacher: PreTrainedModel, settings: DistillationSettings) -> PreTrainedModel:
    """Return a patched copy of the teacher."""
    return settings.convert(copy.deepcopy(teacher)).eval()


def _mean(values: Sequence[float | None], digits: int = 3) -> str:
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def report(results: Mapping[str, Any], drawn: str) -> str:
    """Return the page as Markdown, with the picture of that name in it."""
    facts, teacher, recipes = results["provenance"], results["teacher"], results["recipes"]
    settings = facts["recommended"]
    tokens = next(iter(next(iter(recipes.values())).values()))["tokens"]
    lines = [
        "# Distillation recipes compared",
        "",
        f"Teacher `{facts['teacher']}` (SHA-256 `{facts['teacher_sha256'][:12]}`), {tokens:,} tokens per run, contexts "
        f"of {settings['block_tokens']} tokens, seeds {facts['seeds']}, window {settings['window']}, a window alone of "
        f"equal cache bytes {facts['equal_cache_window']}. Each recipe below the first two changes one thing in the "
        f"recommended one, but for *{WINDOW_TEXT}*, which has no recall sequences to learn from, and for those that "
        f"name features and a window, which share its cache's bytes otherwise. "
        "Mean ± standard deviation where there are several seeds. Recall: one of 4 or 8 pairs "
        f"in as many tokens, asked for from well beyond any window, {facts['samples']} samples; - where the task does "
        f"not fit. *Off*: the same with the linear branch switched off. Measured {facts['date']} at "
        f"commit `{str(facts['commit'])[:12]}`, torch "
        f"{facts['torch']}, {facts.get('gpu') or facts['processor']}, {facts['threads']} thread(s), load average "
        f"{facts['load_average']}.",
        "",
        f"Made by `{facts['command']}`.",
        "",
        "| recipe | seeds | nats, merely patched | nats | nats, late half | late, off | recall 4 | recall 8 "
        f"| recall 4, off | recall 8, off | nats at {LONGER}x | recall 4 at {LONGER}x "
        "| nats, mix beyond the window | of answers |",
        "| --- " * 14 + "|",
        f"| teacher | | | {teacher['loss_nats']:.3f} | {teacher['late_loss_nats']:.3f} | "
        f"| {_mean([teacher['recall']['4']], 2)} | {_mean([teacher['recall']['8']], 2)} | | "
        f"| {teacher['longer']['loss_nats']:.3f} | {_mean([teacher['longer']['recall']['4']], 2)} "
        f"| {teacher['mix']['loss_nats']:.3f} | {teacher['mix']['answer_nats']:.3f} |",
    ]
    for name, runs in recipes.items():
        found = [run["figures"] for run in runs.values()]
        off = [f["linear_off"] for f in found if f["linear_off"]]
        cells = [
            str(len(runs)),
            f"{results['patched'][name]['loss_nats']:.3f}",
            _mean([f["loss_nats"] for f in found]),
            _mean([f["late_loss_nats"] for f in found]),
            _mean([f["late_loss_nats"] for f in off]) if off else "",
            *(_mean([f["recall"][pairs] for f in found], 2) for pairs in ("4", "8")),
            *(_mean([f["recall"][pairs] for f in off], 2) if off else "" for pairs in ("4", "8")),
            _mean([f["longer"]["loss_nats"] for f in found]),
            _mean([f["longer"]["recall"]["4"] for f in found], 2),
            _mean([f["mix"]["loss_nats"] for f in found]),
            _mean([f["mix"]["answer_nats"] for f in found]),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += _recall_by_length(teacher, recipes)
    lines += _answers(results)
    missing = [name for name in NAMES if name not in recipes]
    lines += ["", f"Not run: {', '.join(missing) or 'nothing'}."]
    lines += ["", *_claims(results), "", f"![Nats of text and recall by recipe]({drawn})", ""]
    lines += ["*A dot is a seed, the dotted line the teacher.*", ""]
    return "\n".join(lines)


def _recall_by_length(teacher: Mapping[str, Any], recipes: Mapping[str, Any]) -> list[str]:
    """Return a table of recall at other lengths and of the rate of training, if recall was measured there."""
    factors = list(teacher.get("recall_at", {}))
    if not factors:
        return []
    lines = ["", "| recall of 4 pairs | " + " | ".join(f"{factor}x" for factor in factors) + " | tokens/s |"]
    lines.append("| --- " * (len(factors) + 2) + "|")
    lines.append("| teacher | " + " | ".join(_mean([teacher["recall_at"][factor]], 2) for factor in factors) + " | |")
    for name, runs in recipes.items():
        cells = [_mean([run["figures"]["recall_at"][factor] for run in runs.values()], 2) for factor in factors]
        cells.append(_mean([run["tokens"] / run["elapsed_s"] for run in runs.values()], 0))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _answers(results: Mapping[str, Any]) -> list[str]:
    """Return a table per task of what was written, all seeds together, if anything was asked."""
    teacher = results.get("answers", {}).get("teacher")
    if not teacher:
        return []
    block = results["provenance"]["recommended"]["block_tokens"]
    models = {"teacher": [teacher]}
    for name, runs in results["recipes"].items():
        if found := [run["answers"] for run in runs.values() if run.get("answers")]:
            models[name] = found
    lines = [
        "",
        "## What they write",
        "",
        f"The share of questions that greedy decoding answers word for word, token by token from the cache, beside the "
        "nats per token of the true answer: questions of "
        f"{', '.join(f'{factor * block:,}' for factor in FACTORS)} tokens, what is asked for spread over the first "
        f"{MAX_DEPTH:.0f}% of them, {results['provenance']['answer_samples']} per seed, the same for all. With "
        "Wilson's 95% interval of all seeds together.",
    ]
    # In results of before forms were held out, every form is a trained one, in noise.
    for task in dict.fromkeys(row["task"] for row in teacher):
        one = next(row for row in teacher if row["task"] == task)
        form = "held out of training" if one.get("held_out") else "a trained form"
        lines += ["", f"| {task} ({form}) | " + " | ".join(f"{factor}x" for factor in FACTORS) + " |"]
        lines.append("| --- " * (len(FACTORS) + 1) + "|")
        for name, seeds in models.items():
            rows = zip(*([row for row in seed if row["task"] == task] for seed in seeds), strict=True)
            lines.append(f"| {name} | " + " | ".join(shown(_pooled(found)) for found in rows) + " |")
    return lines


def _pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was written by students of several seeds to the same questions as one row."""
    if rows[0]["missing"]:
        return dict(rows[0])
    n = sum(row["n"] for row in rows)
    right = sum(row["exact"] * row["n"] for row in rows)
    # Every seed answers the same questions, so each has as many tokens of answers.
    nats = statistics.fmean(row["answer_nats"] for row in rows)
    return {**rows[0], "n": n, "exact": right / n, "ci95": wilson_interval(right, n), "answer_nats": nats}


def picture(results: Mapping[str, Any], path: Path) -> None:
    """Draw each recipe's nats of text and recall, a dot per seed, with the teacher's as lines."""
    from matplotlib import pyplot as plt

    teacher, recipes = results["teacher"], dict(reversed(results["recipes"].items()))
    panels = {
        "nats per token of held-out text": ("loss_nats",),
        "the same, late half of the context": ("late_loss_nats",),
        "recall of 8 pairs": ("recall", "8"),
    }
    # Recipes that lost text would press all others together.
    farthest = 3.1
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 0.3 * len(recipes) + 1.2), sharey=True)
    for axis, (title, keys) in zip(axes, panels.items(), strict=True):
        best = functools.reduce(lambda found, key: found[key], keys, teacher)
        if best is not None:
            axis.axvline(best, color="grey", linestyle=":")
        for row, (name, runs) in enumerate(recipes.items()):
            values = [functools.reduce(lambda found, key: found[key], keys, run["figures"]) for run in runs.values()]
            shown = [value for value in values if value is not None and value <= farthest]
            axis.plot(
                shown, [row] * len(shown), "o", alpha=0.7, color="tab:red" if name == "recommended" else "tab:blue"
            )
            if any(value is not None and value > farthest for value in values):
                axis.annotate(
                    f"{max(values):.2f} →", (1, row), xycoords=("axes fraction", "data"), ha="right", va="center"
                )
        axis.set(title=title, yticks=range(len(recipes)), yticklabels=list(recipes))
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _figure(run: Mapping[str, Any], keys: Sequence[str]) -> float:
    return float(functools.reduce(lambda found, key: found[key], keys, run["figures"]))


def _claims(results: Mapping[str, Any]) -> list[str]:
    """Say, seed by seed, what the recommended recipe reaches of what it is meant to reach."""
    recipes, teacher = results["recipes"], results["teacher"]
    lines = ["## What it shows", ""]
    if {"recommended", WINDOW} <= recipes.keys():
        for pairs in ("4", "8"):
            shares = [
                gap_closed(
                    recipes["recommended"][seed]["figures"]["recall"][pairs],
                    teacher["recall"][pairs],
                    recipes[WINDOW][seed]["figures"]["recall"][pairs],
                )
                for seed in recipes["recommended"]
                if seed in recipes[WINDOW]
            ]
            known = [share for share in shares if share is not None]
            if known:
                lines.append(
                    f"- Gap in recall of {pairs} pairs between the window alone and the teacher that the recommended "
                    f"recipe closes: {_mean(known, 2)}."
                )
    for other, what in ((LOLCATS, "LoLCATs' recipe"), (WINDOW, "the window alone")):
        if {"recommended", other} <= recipes.keys():
            block = results["provenance"]["recommended"]["block_tokens"]
            places = {
                f"text of {block:,} tokens": ("loss_nats",),
                "their late half": ("late_loss_nats",),
                f"text of {LONGER * block:,} tokens": ("longer", "loss_nats"),
                "text and recall as trained on, tokens beyond the window": ("mix", "loss_nats"),
            }
            for where, keys in places.items():
                gains = [
                    _figure(recipes[other][seed], keys) - _figure(run, keys)
                    for seed, run in recipes["recommended"].items()
                    if seed in recipes[other]
                ]
                lines.append(f"- Held-out nats by which it beats {what}, {where}: {_mean(gains, 4)}.")
    return lines


if __name__ == "__main__":
    main()
