"""Write tests/golden/VERSION: what this version saves, for later versions to read.

python -m tests.golden.make
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_linear_attn import __version__, encode_context, patch_model
from hf_linear_attn.patching.call_cache import NAME
from tests.distill.tiny import tiny_teacher

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "elu": {"feature_map": "elu"},
    "gate": {"feature_map": "hedgehog", "window": 8, "sinks": 2, "mix": "gate"},
    "mixed": {"feature_map": "norm_preserving", "window": 8, "sinks": 2, "layers": [1]},
    "recommended": {"feature_map": "norm_preserving", "window": 8, "sinks": 2},
    "shared": {"feature_map": "hedgehog", "window": 8, "mix": "shared"},
    "window": {"window": 8, "sinks": 2, "mix": "window"},
}
CONTEXT, SHOWN = 25, 8
"""Tokens that a context holds, and last positions whose logits are kept."""


@torch.no_grad()
def give(model: Any, ids: torch.Tensor, context: Any) -> dict[str, torch.Tensor]:
    """Return what a later version has to give again."""
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    after = model(ids[:, CONTEXT:], **{NAME: context.copy()}).logits
    return {
        "logits": model(ids).logits[:, -SHOWN:].contiguous(),
        "after_context": after[:, -SHOWN:].contiguous(),
        "greedy": model.generate(ids, **options)[:, ids.shape[1] :].contiguous(),
    }


def make(folder: Path) -> None:
    """Write every case into a folder that does not exist yet."""
    folder.mkdir()
    for name, settings in CASES.items():
        torch.manual_seed(0)
        model = patch_model(tiny_teacher(), **settings).eval()
        for parameter in (p for n, p in model.named_parameters() if "linear_attention" in n):
            # Nothing learned stays at its start, where a weight left out would not be noticed.
            torch.nn.init.normal_(parameter, std=0.2)
        ids = torch.randint(3, 259, (2, 40))
        model.save_pretrained(folder / name)
        context = encode_context(model, ids[:, :CONTEXT])
        context.save(folder / name / "context.safetensors")
        save_file({"input_ids": ids, **give(model, ids, context)}, folder / name / "expected.safetensors")


if __name__ == "__main__":
    if (HERE / __version__).exists():
        sys.exit(f"{HERE / __version__} exists; what a release saved stays as it is.")
    make(HERE / __version__)
