"""The model card of a student."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_linear_attn.distill.run import DistillResult

CARD = """\
---
library_name: transformers
tags:
- linear-attention
- hf_linear_attn
---

# {name} with linear attention

Distilled from {teacher} by hf_linear_attn: time grows linearly with the context, and the generation state has a
constant size. Without that package the folder loads as a softmax model again, with a report of unexpected weights, and
its answers are worthless. Load it so:

```python
from hf_linear_attn import from_pretrained

model = from_pretrained("this/folder")
```

## Figures

{figures}

![Loss against training tokens](loss.svg)

## Recipe

{tokens:,} tokens in {minutes:.1f} minutes. The last stage trained {trained:,} of {all:,} parameters; feature maps and
mixing weights have {feature_maps:,}. Data: {data}.

```json
{settings}
```

## Limits

A linear branch keeps a sum over all keys, whose size does not grow with the context: with more to remember than it
holds, recall degrades, and no figure above says anything about contexts longer than those measured. Where the figures
with the linear branch off are as good as those with it, the model answers from its window alone.
"""


def write_card(result: DistillResult, folder: Path) -> None:
    """Write the model card with what was measured."""
    settings = result.settings
    changed = {name: value for name, value in settings.to_dict().items() if name != "output_dir"}
    (folder / "README.md").write_text(
        CARD.format(
            name=type(result.student).__name__,
            teacher=f"`{settings.model}`" if settings.model else "a softmax model",
            figures=figures_table(result.metrics),
            tokens=result.tokens,
            minutes=result.elapsed_s / 60,
            data=settings.dataset or "the source text of Python's standard library",
            settings=json.dumps(changed, indent=2),
            **result.trainable_parameters,
        )
    )


def figures_table(metrics: dict[str, Any]) -> str:
    """Return measured figures as a Markdown table."""
    if not metrics:
        return "Nothing was measured (`heldout_rows=0`)."
    columns = dict(metrics)
    if metrics["student"]["linear_off"]:
        columns["student, linear branch off"] = metrics["student"]["linear_off"]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("held-out loss, nats per token", lambda m: f"{m['loss_nats']:.4f}"),
        ("the same, second half of the context", lambda m: f"{m['late_loss_nats']:.4f}"),
    ]
    for pairs in metrics["student"]["recall"]:
        rows.append((f"recall of one of {pairs} pairs", partial(_recall, pairs=pairs)))
    lines = ["| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(show(m) for m in columns.values()) + " |" for name, show in rows]
    return "\n".join(lines)


def _recall(figures: dict[str, Any], pairs: str) -> str:
    value = figures["recall"][pairs]
    return "does not fit" if value is None else f"{value:.3f}"
