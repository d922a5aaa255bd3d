"""Every feature map on one teacher: merely patched, after the same short distillation, and its time beside softmax.

    python benchmarks/run.py --suite maps --output docs/results/feature-maps.json
    python -m tools.catalogue docs/results/feature-maps.json > docs/feature-maps.md

Runs that are finished are kept in ``--work-dir`` and not repeated, so an interrupted suite goes on where it stopped.
"""

import argparse
import copy
import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from harness import Parser, by_turns, gap_closed, once, provenance
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn import available_feature_maps, linear_attention, patch_model
from hf_linear_attn.diagnostics import ApproximationSettings, inspect_model
from hf_linear_attn.diagnostics.report import EXACT
from hf_linear_attn.distill import Data, DistillationSettings, distill, load_data
from hf_linear_attn.distill.measure import heldout_loss
from hf_linear_attn.feature_maps import get_feature_map, load_feature_maps
from hf_linear_attn.feature_maps.base import feature_map_class
from hf_linear_attn.loading import load_model, load_tokenizer

BLIND = "own token only"
"""The baseline: a window of one token, so that attention carries nothing from token to token."""

TIMED_LENGTHS = (4096, 32768)
TIMED_HEADS, TIMED_DIM = 2, 64


def parser() -> Parser:
    """Return the suite's arguments."""
    found = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--teacher", default="examples/teacher", help="softmax checkpoint (%(default)s)")
    found.add_argument("--dataset", help="text to train and judge on; Python's standard library by default")
    found.add_argument("--maps", nargs="+", metavar="NAME", help="feature maps; all by default")
    found.add_argument("--feature-map-file", type=Path, help="Python file that registers feature maps of your own")
    found.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (0 1 2)")
    found.add_argument("--transfer-steps", type=int, default=20, help="steps of attention transfer (%(default)s)")
    found.add_argument("--distill-steps", type=int, default=80, help="steps of logit distillation (%(default)s)")
    found.add_argument("--block-tokens", type=int, default=256, help="tokens of a sequence (%(default)s)")
    found.add_argument("--rows", type=int, default=4, help="sequences of a step (%(default)s)")
    found.add_argument("--heldout-rows", type=int, default=16, help="held-out sequences of each kind (%(default)s)")
    found.add_argument("--repeats", type=int, default=3, help="timings of which the median counts; 0 for none (3)")
    found.add_argument("--work-dir", type=Path, default=Path("runs/maps"), help="finished runs (%(default)s)")
    found.add_argument("--finished-only", action="store_true", help="run nothing, write what is finished in --work-dir")
    found.add_argument("--output", type=Path, required=True, help="result, a JSON file")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    arguments = parser().parse_args(argv)
    if arguments.feature_map_file is not None:
        load_feature_maps(arguments.feature_map_file)
    names = list(arguments.maps or available_feature_maps())
    teacher = load_model(arguments.teacher, "--teacher", attention="softmax", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(arguments.teacher)
    base = settings_of(arguments, BLIND, 0)

    @cache
    def data_of(seed: int) -> tuple[Data, Data]:
        return load_data(settings_of(arguments, BLIND, seed), tokenizer)

    fingerprint = hashlib.sha256(
        b"".join(x.numpy().tobytes() for _, x in sorted(teacher.state_dict().items()))
    ).hexdigest()
    facts = json.dumps([fingerprint, base.to_dict(), arguments.heldout_rows, arguments.transfer_steps])
    recipe = hashlib.sha256(facts.encode()).hexdigest()[:12]
    folder = arguments.work_dir / recipe
    folder.mkdir(parents=True, exist_ok=True)

    def kept(key: str, make: Callable[[], Any], folder: Path = folder) -> Any:
        path = folder / f"{key}.json"
        return None if arguments.finished_only and not path.exists() else once(path, make)

    def loss(model: PreTrainedModel) -> dict[str, float]:
        return losses(model, data_of(0)[1], arguments.heldout_rows, arguments.block_tokens)

    def distilled(name: str, seed: int) -> dict[str, float]:
        settings = settings_of(arguments, name, seed)
        result = distill(settings, teacher=teacher, tokenizer=tokenizer, data=data_of(seed))
        return loss(result.student) | {"tokens": result.tokens}

    results: dict[str, Any] = {
        "provenance": {
            **provenance("maps", list(sys.argv[1:] if argv is None else argv)),
            "teacher": arguments.teacher,
            "teacher_sha256": fingerprint,
            "heldout_rows": arguments.heldout_rows,
            "transfer_steps": arguments.transfer_steps,
            "distillation": base.to_dict(),
        },
        "teacher": kept("teacher", lambda: loss(teacher)),
        "maps": {},
    }
    errors = kept("errors", lambda: approximation(teacher, tokenizer, data_of(0)[1], names, arguments.block_tokens))
    for name in [BLIND, *names]:
        entry: dict[str, Any] = {"patched": kept(f"{name}-patched", lambda name=name: loss(patched(teacher, name)))}
        if name != BLIND:
            entry["output_error"] = errors and errors.get(name)
        results["maps"][name] = entry
    results["times"] = {}
    if arguments.repeats:
        # They do not depend on the teacher.
        key = hashlib.sha256(f"{names}{arguments.repeats}{torch.__version__}".encode()).hexdigest()[:12]
        results["times"] = kept(f"times-{key}", lambda: times(names, arguments.repeats), arguments.work_dir) or {}
    # Seed by seed, so that an interrupted suite has measured all maps alike.
    for seed in arguments.seeds:
        for name, entry in results["maps"].items():
            run = kept(f"{name}-distilled-{seed}", lambda name=name, seed=seed: distilled(name, seed))
            if run is not None:
                entry.setdefault("distilled", []).append(run)
    results |= table(results)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


def settings_of(arguments: argparse.Namespace, name: str, seed: int) -> DistillationSettings:
    """Return the distillation of one map and seed: the same for all but for the map."""
    learned = name != BLIND and feature_map_class(name).learned
    return DistillationSettings(
        **conversion(name),
        sinks=0,
        # What has nothing that transfer could train gets those steps as distillation.
        stages=["transfer", "distill"] if learned else ["distill"],
        transfer_steps=arguments.transfer_steps,
        distill_steps=arguments.distill_steps + (0 if learned else arguments.transfer_steps),
        dataset=arguments.dataset,
        block_tokens=arguments.block_tokens,
        rows=arguments.rows,
        heldout_rows=0,
        progress=False,
        seed=seed,
    )


def conversion(name: str) -> dict[str, Any]:
    """Return how the teacher is converted: a map without a window, or the baseline."""
    if name == BLIND:
        return {"feature_map": "elu", "window": 1, "mix": "window"}
    return {"feature_map": name, "window": None, "mix": "gate"}


def patched(teacher: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a patched copy of the teacher."""
    return patch_model(copy.deepcopy(teacher), **conversion(name)).eval()


@torch.no_grad()
def losses(model: PreTrainedModel, data: Data, rows: int, length: int) -> dict[str, float]:
    """Return nats per token of held-out text, and nats per token of the answers to held-out recall questions."""
    total, tokens = 0.0, 0
    for start in range(0, rows, 8):
        batch = data.collate([data.recall_row(n, length) for n in range(start, min(start + 8, rows))], length)
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
        nats = cross_entropy(logits.float().transpose(1, 2), batch.input_ids[:, 1:], reduction="none")
        asked = batch.weights[:, 1:] > 0
        total, tokens = total + nats[asked].sum().item(), tokens + int(asked.sum())
    return {"text": heldout_loss(model, data, rows, length)["loss_nats"], "answers": total / tokens}


def approximation(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Data, names: Sequence[str], length: int
) -> dict[str, float]:
    """Return each map's relative error of the attention output, mean over layers and heads, before any training."""
    text = tokenizer.decode(data.text_row(0, length).input_ids, skip_special_tokens=True)
    settings = ApproximationSettings(matrix_tokens=2, ranked_queries=1)
    found = inspect_model(copy.deepcopy(teacher), tokenizer, text, maps=names, max_tokens=length, settings=settings)
    return {name: means["output_error"] for name, means in found["summary"]["maps"].items()}


@torch.no_grad()
def times(names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return medians of the milliseconds of one causal forward in fp32, by length and map, softmax among them."""
    found = {}
    for tokens in TIMED_LENGTHS:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, TIMED_HEADS, tokens, TIMED_DIM, generator=generator) for _ in range(3))
        calls = {EXACT: partial(scaled_dot_product_attention, q, k, v, is_causal=True)} | {
            name: partial(
                linear_attention,
                *(q, k, v),
                get_feature_map(name, TIMED_DIM, TIMED_HEADS, **timed_options(name)),
                return_state=False,
            )
            for name in names
        }
        found[str(tokens)] = {name: taken["median_ms"] for name, taken in by_turns(calls, repeats).items()}
    return {"ms": found, "repeats": repeats, "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]}


def timed_options(name: str) -> dict[str, int]:
    """Return the options without which a map refuses the longest timed sequence."""
    return {"max_length": max(TIMED_LENGTHS)} if name == "cosformer" else {}


TEXT = """\
All maps on one small teacher, without a window, merely patched and after the same short distillation ({steps} steps
of {tokens} tokens, {transfer} of them attention transfer where the map has weights; {seeds}).
*Gap closed* is `1 - (L - L_teacher) / (L_blind - L_teacher)`, L in nats per token of held-out {what}, {length} tokens
at a time. The baseline is the teacher with a window of one token, so that no token sees another, treated alike: merely
patched in the first column, distilled with the same data in the others. 0 = the map carries nothing from token to
token, 1 = the teacher; below 0, it harms. *Answers* is the same for the answers to recall questions. So short a
distillation ranks maps by how soon they learn, not by how far they come. *Output error* is that of
`hf-linear-attn inspect`, before any training.{missing}

Losses: teacher {teacher:.3f} (answers {teacher_answers:.3f}); own token only, merely patched {blind_patched:.3f},
distilled {blind:.3f} (answers {blind_answers:.3f})."""

TIMES = """\
Speed-ups are those of one causal forward in fp32 on a CPU ({threads} of {cpus} cores, load average {load:.1f}), {heads}
heads of {dim}, over `scaled_dot_product_attention` in turn, medians of {repeats}; above 1 the map is faster."""


def _cell(values: Sequence[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": statistics.fmean(known),
        "sd": statistics.stdev(known) if len(known) > 1 else None,
        "seeds": len(known),
    }


def table(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows: ``columns``, ``digits``, ``rows`` (best first) and ``text``."""
    teacher, maps, facts = results["teacher"], results["maps"], results["provenance"]
    blind = {kind: statistics.fmean(run[kind] for run in maps[BLIND]["distilled"]) for kind in teacher}

    def gaps(runs: Sequence[Mapping[str, float] | None], kind: str, baseline: Mapping[str, float]) -> Any:
        return _cell([gap_closed(run and run[kind], teacher[kind], baseline[kind]) for run in runs])

    columns = {
        "error": "output error, untrained",
        "patched": "gap closed, patched",
        "distilled": "gap closed, distilled",
        "answers": "answers, distilled",
    }
    rows: dict[str, Any] = {}
    for name, entry in maps.items():
        if name == BLIND:
            continue
        runs = entry.get("distilled", [])
        rows[name] = {
            "error": _cell([entry["output_error"]]),
            "patched": gaps([entry["patched"]], "text", maps[BLIND]["patched"]),
            "distilled": gaps(runs, "text", blind),
            "answers": gaps(runs, "answers", blind),
        }
        for tokens, taken in results["times"].get("ms", {}).items():
            columns[tokens] = f"speed-up at {int(tokens) // 1024}k"
            rows[name][tokens] = _cell([taken[EXACT] / taken[name]])
    recipe, counts = facts["distillation"], sorted({len(entry.get("distilled", [])) for entry in maps.values()})
    text = TEXT.format(
        steps=recipe["distill_steps"],
        what=recipe["dataset"] or "Python source",
        transfer=facts["transfer_steps"],
        tokens=recipe["rows"] * recipe["block_tokens"],
        length=recipe["block_tokens"],
        seeds=f"mean ± standard deviation over at most {counts[-1]} seeds" if counts[-1] > 1 else "one seed",
        missing=" A dash stands for runs that were not made." if counts[0] == 0 else "",
        teacher=teacher["text"],
        teacher_answers=teacher["answers"],
        blind_patched=maps[BLIND]["patched"]["text"],
        blind=blind["text"],
        blind_answers=blind["answers"],
    )
    if results["times"]:
        text += "\n" + TIMES.format(
            threads=results["times"]["threads"],
            cpus=facts["cpus"],
            load=results["times"]["load_average"],
            heads=TIMED_HEADS,
            dim=TIMED_DIM,
            repeats=results["times"]["repeats"],
        )
    order = sorted(rows, key=lambda name: -rows[name]["distilled"]["mean"] if rows[name]["distilled"] else math.inf)
    digits = {tokens: 1 for tokens in columns if tokens.isdigit()}
    return {"columns": columns, "digits": digits, "rows": {name: rows[name] for name in order}, "text": text}


if __name__ == "__main__":
    main()
