"""The model card of a student."""

import json
from pathlib import Path
from typing import Any

from peft import PeftModel

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.distill.measure import MAX_DEPTH, shown
from hf_linear_attn.distill.presets import CONVERSION
from hf_linear_attn.distill.result import DistillResult
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.evaluation.embedding import LOW_PERCENT
from hf_linear_attn.evaluation.view import markdown_table
from hf_linear_attn.files import write_atomic

CARD = """\
---
library_name: transformers
tags:
- linear-attention
- hf_linear_attn
---

# {name} with linear attention

Distilled from {teacher} by hf_linear_attn: {gain}. {kind} Load it so:

```python
{recipe}
```

## Figures

{figures}

![Loss against training tokens](loss.svg)

## Recipe

{tokens:,} tokens in {minutes:.1f} minutes. The last stage trained {trained:,} of {all:,} parameters; feature maps and
mixing weights have {feature_maps:,}. Data: {data}.{recall}

```json
{settings}
```

## Limits

{limits}
"""

OF_LANGUAGE_MODELS = """\
A linear branch keeps a sum over all keys, whose size does not grow with the context: with more to remember than it
holds, recall degrades, and no figure above says anything about contexts longer than those measured. Where the figures
with the linear branch off are as good as those with it, the model answers from its window alone."""

OF_ENCODERS = """\
No figure above says anything about texts longer than those measured, or of another kind. A vector index that was made
with the teacher's embeddings has to be made anew: the student's are near to them, not the same."""

GAIN = {
    False: "time grows linearly with the context, and the generation state has a constant size",
    True: "time grows linearly with the text",
}
"""What is won, of language models and of encoders."""

WHOLE = """\
Without that package the folder loads as a softmax model again, with a report of unexpected weights, and its answers are
worthless."""

ADAPTER = """\
The folder holds no whole model but LoRA adapters, feature maps and mixing weights, for a base that is patched alike."""


def loading_recipe(result: DistillResult) -> str:
    """Return the Python lines that load a student's folder.

    An adapter goes on the model that it was trained on: the student that the run began with, or the teacher, patched.
    """
    settings, config = result.settings, result.student.config.linear_attention
    lines = []
    if settings.feature_map_file is not None:
        lines += [
            "from hf_linear_attn.feature_maps import load_feature_maps",
            "",
            f"load_feature_maps({settings.feature_map_file!r})",
            "",
        ]
    if not isinstance(result.student, PeftModel):
        return "\n".join(
            [*lines, "from hf_linear_attn import from_pretrained", "", 'model = from_pretrained("this/folder")']
        )
    if settings.student is not None:
        lines += ["from peft import PeftModel", "", "from hf_linear_attn import from_pretrained", ""]
        lines += [f"model = from_pretrained({settings.student!r})"]
    else:
        base = settings.model or result.student.config._name_or_path or "the/softmax/model"
        defaults = LinearAttentionConfig().to_dict()
        changed = [name for name in CONVERSION if name in config and config[name] != defaults.get(name)]
        options = "".join(f"    {name}={config[name]!r},\n" for name in changed)
        lines += ["from peft import PeftModel", "from transformers import AutoModelForCausalLM", ""]
        lines += ["from hf_linear_attn import patch_model", ""]
        lines += [f"model = AutoModelForCausalLM.from_pretrained({base!r})"]
        lines += [f"model = patch_model(\n    model,\n{options})"]
    return "\n".join([*lines, 'model = PeftModel.from_pretrained(model, "this/folder")'])


def write_card(result: DistillResult, folder: Path) -> None:
    """Write the model card with what was measured."""
    settings, student = result.settings, result.student
    if isinstance(student, PeftModel):
        student = student.get_base_model()
    changed = {name: value for name, value in settings.to_dict().items() if name not in ("output_dir", "overwrite")}
    write_atomic(
        folder / "README.md",
        CARD.format(
            name=type(student).__name__,
            teacher=f"`{settings.model}`" if settings.model else "a softmax model",
            gain=GAIN[settings.encoder],
            limits=OF_ENCODERS if settings.encoder else OF_LANGUAGE_MODELS,
            kind=ADAPTER if isinstance(result.student, PeftModel) else WHOLE,
            recipe=loading_recipe(result),
            figures=figures_table(result.metrics) + answers_table(result.metrics, settings.trained_length()),
            tokens=result.tokens,
            minutes=result.elapsed_s / 60,
            data=", ".join(settings.dataset or ["the source text of Python's standard library"]),
            recall=recall_sentence(settings),
            settings=json.dumps(changed, indent=2),
            **result.trainable_parameters,
        ),
    )


def recall_sentence(settings: DistillationSettings) -> str:
    """Return what a card says of the recall sequences, nothing where there were none."""
    if not settings.recall_share:
        return ""
    said = f" Of the sequences, {100 * settings.recall_share:g}% were generated recall tasks,"
    if not settings.recall_text:
        return f"{said} in noise."
    since = f", from {100 * settings.recall_text_from:g}% of the steps on" if settings.recall_text_from else ""
    return f"{said} {100 * settings.recall_text:g}% of them set into training text{since}; the others stood in noise."


def figures_table(metrics: dict[str, Any]) -> str:
    """Return measured figures as a Markdown table."""
    if not metrics:
        return "Nothing was measured (`heldout_rows=0`)."
    columns = dict(metrics)
    if "cosine_mean" in metrics["student"]:
        return embedding_table(metrics)
    if metrics["student"]["linear_off"]:
        columns["student, linear branch off"] = metrics["student"]["linear_off"]
    rows = [
        ["held-out loss, nats per token", *(f"{m['loss_nats']:.4f}" for m in columns.values())],
        ["the same, second half of the context", *(f"{m['late_loss_nats']:.4f}" for m in columns.values())],
    ]
    for pairs in metrics["student"]["recall"]:
        shares = [m["recall"][pairs] for m in columns.values()]
        cells = ["does not fit" if share is None else f"{share:.3f}" for share in shares]
        rows.append([f"recall of one of {pairs} pairs, a trained form in noise", *cells])
    return markdown_table(["", *columns], rows)


def answers_table(metrics: dict[str, Any], trained_length: int) -> str:
    """Return what was written as a Markdown table with a sentence before it, or nothing where nothing was asked."""
    asked = {name: figures["answers"] for name, figures in metrics.items() if figures.get("answers")}
    counts = sorted({row["n"] for rows in asked.values() for row in rows} - {0})
    if not counts:
        return ""
    lengths = list(dict.fromkeys(row["length"] for row in next(iter(asked.values()))))
    lines = [
        "",
        "",
        f"What they write: the share of {counts[-1]} questions per field that greedy decoding answers word for word, "
        "with Wilson's 95% interval, beside the nats per token of the true answer. What is asked for stands in the "
        f"first {MAX_DEPTH:.0f}% of the context. The longest sequences of the training had {trained_length:,} tokens.",
    ]
    for held_out, title in ((True, HELD_OUT), (False, TRAINED)):
        chosen = {
            name: [row for row in found if row.get("held_out", False) is held_out] for name, found in asked.items()
        }
        if any(chosen.values()):
            heads = ["", *(f"{length:,} tokens" for length in lengths)]
            lines += ["", title, "", markdown_table(heads, _answer_rows(chosen))]
    return "\n".join(lines)


HELD_OUT = "**Forms that are held out of training**, in real text that is held out too:"
TRAINED = "**Forms that training had** or may have, in noise:"


def _answer_rows(asked: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Return the rows of a table of answers, by task and model."""
    teacher = {(row["task"], row["length"]): row for row in asked.get("teacher", ())}
    rows = []
    for task in dict.fromkeys(row["task"] for found in asked.values() for row in found):
        for name, found in asked.items():
            beside = {} if name == "teacher" else teacher
            cells = [shown(row, beside.get((task, row["length"]))) for row in found if row["task"] == task]
            rows.append([f"{task}, {name}", *cells])
    return rows


def embedding_table(metrics: dict[str, Any]) -> str:
    """Return measured figures of encoders as a Markdown table."""
    student, teacher = metrics["student"], metrics["teacher"]
    rows = [
        ["mean cosine to the teacher", f"{student['cosine_mean']:.4f}", "1", f"{student['between_texts']:.4f}"],
        [f"the same, worst {LOW_PERCENT}%", f"{student[f'cosine_p{LOW_PERCENT:02d}']:.4f}", "1", ""],
    ]
    for name, title in (("mean_reciprocal_rank", "mean reciprocal rank"), ("top1", "found first")):
        figures = f"{student[name]:.4f}", f"{teacher[name]:.4f}"
        rows.append([f"second half of a text by its first, {title}", *figures, ""])
    table = markdown_table(["", "student", "teacher", "teacher, different texts"], rows)
    return "\n".join([f"On {student['texts']} held-out texts:", "", table])
