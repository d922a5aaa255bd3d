"""docs/feature-maps.md, made from the registry and from measured results: ``python -m ... [RESULTS] > PAGE``."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_linear_attn.feature_maps import available_feature_maps, get_feature_map
from hf_linear_attn.feature_maps.base import feature_map_class, map_options

COMMON = ("scale", "separate", "per_head")
HEAD_DIMS = (64, 128)

INTRODUCTION = """\
<!-- Do not edit; made by
python -m tools.catalogue docs/results/feature-maps.json > docs/feature-maps.md -->
# Feature maps

A feature map decides what linear attention can do: `phi(q).phi(k)` stands in for `exp(scaling q.k)`. Any of them is one
word away:

```python
from transformers import AutoModelForCausalLM
from hf_linear_attn import patch_model, unpatch_model

model = AutoModelForCausalLM.from_pretrained("your/model")
model = patch_model(model, feature_map="norm_preserving")
model = unpatch_model(model)
model = patch_model(model, feature_map="performer", feature_map_options={"num_features": 512})
```

See how near each comes to softmax on *your* model, before you train anything:

```sh
hf-linear-attn inspect your/model --text-file your.txt
```

Maps that run inside the kernels cost no memory for features; of the others, features are computed first, `F` numbers
per token and head, and read by the same kernels. The state holds `F (V + 1)` fp32 numbers per key head, whatever the
context. Features are computed in fp32, whatever the model's dtype.
"""

OPTIONS = """\
## Settings

All maps take `scale` (default 1; a factor on q and k before the map), and those with weights `separate` (default true;
q and k have weights of their own) and `per_head` (default true; every head has). Random maps draw one projection for
all heads unless `per_head` is set, and q and k always share it. Their own settings:
"""

OWN = """\
## A map of your own

One file, and its name works everywhere: in `patch_model`, checkpoints, the command line (`--feature-map-file`), this
page, tests and benchmarks.

```python
import torch
from hf_linear_attn import register_feature_map
from hf_linear_attn.feature_maps import FeatureMap

@register_feature_map
class CubedRelu(FeatureMap):
    name, formula, paper = "cubed_relu", "max(x, 0)^3", "none"

    @property
    def feature_dim(self):
        return self.head_dim

    def phi(self, x):  # x in fp32, already times `scale`
        return torch.relu(x) ** 3
```

Set `non_negative = False` if a product of features can be negative, and `learned = True` if it has parameters. Load the
file before a checkpoint that names the map: nothing in a checkpoint is ever executed.

To look at features, hook the map: `model.model.layers[0].self_attn.linear_attention.feature_map.register_forward_hook`.
Kernels and loops that compute features themselves leave a map with hooks to PyTorch, which takes longer. Long texts
come in pieces, and in a step some maps get the key and the queries in one call.
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _description(name: str) -> list[str]:
    cls = feature_map_class(name)
    sizes, weights = [], "-"
    for head_dim in HEAD_DIMS:
        phi = get_feature_map(name, head_dim)
        sizes.append(str(phi.feature_dim))
        count = sum(p.numel() for p in phi.parameters())
        if count and head_dim == HEAD_DIMS[0]:
            weights = str(count)
    return [
        f"`{name}`",
        # A bar would end the table's cell.
        f"`{cls.formula}`".replace("|", "\\|"),
        cls.paper,
        "in the kernels" if cls.kernel else "before them",
        ">= 0" if get_feature_map(name, HEAD_DIMS[0]).non_negative else "any",
        *sizes,
        weights,
    ]


def _settings(name: str) -> str:
    own = [f"`{key}` ({value})" for key, value in map_options(feature_map_class(name)).items() if key not in COMMON]
    return f"* `{name}`: {', '.join(own)}\n" if own else ""


def _mean(cell: Mapping[str, float] | None, digits: int = 3) -> str:
    if cell is None:
        return "-"
    spread = f" ± {cell['sd']:.{digits}f}" if cell.get("sd") is not None else ""
    return f"{cell['mean']:.{digits}f}{spread}"


def measured(results: Mapping[str, Any]) -> str:
    """Return the section of measured figures.

    Args:
        results: The content of docs/results/feature-maps.json.
    """
    columns: Mapping[str, str] = results["columns"]
    rows = [
        [f"`{name}`", *(_mean(cells.get(key), results["digits"].get(key, 3)) for key in columns)]
        for name, cells in results["rows"].items()
    ]
    return f"## Measured\n\n{results['text']}\n\n" + _table(["map", *columns.values()], rows)


def page(results: Mapping[str, Any] | None = None) -> str:
    """Return docs/feature-maps.md.

    Args:
        results: Measured figures; None for a page without them.

    Returns:
        Markdown.

    Example:
        >>> "| `elu` | `elu(x) + 1` |" in page()
        True
    """
    names = available_feature_maps()
    head = ["map", "phi(x)", "paper", "computed", "phi(q).phi(k)"]
    head += [f"F at D = {head_dim}" for head_dim in HEAD_DIMS] + [f"weights per head at D = {HEAD_DIMS[0]}, q and k"]
    cautions = [
        f"* `{name}`: {feature_map_class(name).caution}.\n" for name in names if feature_map_class(name).caution
    ]
    parts = [
        INTRODUCTION,
        "## The maps\n\n" + _table(head, [_description(name) for name in names], left=5),
        "With caution:\n\n" + "".join(cautions) if cautions else "",
        OPTIONS + "\n" + "".join(_settings(name) for name in names),
        measured(results) if results else "",
        OWN,
    ]
    return "\n".join(part for part in parts if part)


def main(argv: Sequence[str]) -> None:
    """Write the page to standard output.

    Args:
        argv: The path of the measured results, or nothing.
    """
    results = json.loads(Path(argv[0]).read_text(encoding="utf-8")) if argv else None
    sys.stdout.write(page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
