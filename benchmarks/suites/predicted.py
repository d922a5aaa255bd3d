"""What the model of clocks and bytes predicts for linear attention's kernels, per shape and processor.

    python benchmarks/run.py --suite predicted

The model chooses how sequences are cut (hf_linear_attn/ops/linear_attention/triton/model.py). Nothing is run or timed:
these are predictions, to be held against `--suite kernels` on a GPU. It runs on any machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import facts_line, markdown, provenance, write

from hf_linear_attn.ops.linear_attention.triton.model import (
    GAP,
    Costs,
    Cut,
    dkv_cut,
    dq_cut,
    forward_cut,
    microseconds,
)
from hf_linear_attn.ops.triton.plan import Problem, Target

PROCESSORS = {
    "A100 (sm_80)": Target("sm_80", 108),
    "RTX 4090 (sm_89)": Target("sm_89", 128),
    "H100, H200 (sm_90)": Target("sm_90", 132),
    "MI300X (gfx942)": Target("gfx942", 304),
}
# Batch, query and key heads, features, values, map.
SHAPES = (
    (1, 32, 8, 64, 64, "elu"),
    (1, 32, 8, 128, 128, "elu"),
    (1, 32, 32, 128, 128, "elu"),
    (1, 32, 8, 256, 128, "identity"),
)
LENGTHS = (2_048, 8_192, 32_768)
FORMER = 1_024


def problem(target: Target, shape: tuple[int, int, int, int, int, str], tokens: int) -> Problem:
    """Build a problem without memory."""
    batch, heads, kv_heads, D, V, phi = shape
    q, k, v = (
        torch.empty(batch, tokens, n, dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for n, dim in ((heads, D), (kv_heads, D), (kv_heads, V))
    )
    return Problem(target, q, k, v, None, None, None, None, phi, True, 0)


def predict(p: Problem, forward: Cut, dq: Cut, dkv: Cut) -> tuple[float, float]:
    """Return the microseconds of a forward and of a backward."""
    costs = Costs(p)
    backward = microseconds(p.target, costs.dq(dq)) + microseconds(p.target, costs.dkv(dkv))
    return microseconds(p.target, costs.forward(forward)), backward


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = argparse.ArgumentParser(
        prog="run.py --suite predicted", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/predicted.json"), help="result (%(default)s)")
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name, target in PROCESSORS.items():
        for shape in SHAPES:
            for tokens in LENGTHS:
                p = problem(target, shape, tokens)
                forward, backward = predict(p, forward_cut(p), dq_cut(p), dkv_cut(p))
                plain = Cut(False, FORMER)
                former_forward, former_backward = predict(p, plain, plain, plain)
                _, heads, kv_heads, D, V, _ = shape
                rows.append(
                    {
                        "processor": name,
                        "heads": f"{heads} / {kv_heads}",
                        "features, values": f"{D}, {V}",
                        "tokens": tokens,
                        "forward, us": round(forward),
                        "backward, us": round(backward),
                        f"forward, segments of {FORMER}": round(former_forward),
                        f"backward, segments of {FORMER}": round(former_backward),
                    }
                )
    facts = provenance("predicted", argv or [])
    parts = [
        "# Predicted times of linear attention's kernels\n",
        facts_line(facts),
        "**Predictions, not measurements**: microseconds by a model that counts the instructions that processors "
        "issue, the gaps between them, the bytes that cross memory, and a start per launch; bf16, batch 1, whole "
        "launches one after the other. The model is what cuts sequences into segments, and decides whether a walk "
        "carries its state or reads stored ones. The last two columns are the same kernels with carried states and "
        f"segments of {FORMER} tokens. Features wider than values are those of a learned map, computed before.\n",
        "Its counts of instructions are within a factor of 1.7 of those of compiled kernels on sm_90; for the other "
        "processors they are scaled by one number each, and on sm_86, sm_89 and gfx942 no walk reads stored states "
        f"yet. That a warp goes on only every {GAP:.0f} clocks is the one constant that was fitted to a GPU, [an "
        "H100](gpu.md), and to eight key heads of earlier kernels alone. Of the kernels of today, with tiles as tuned "
        "there, 2,048 to 32,768 tokens take 0.84 to 1.36 of what was then measured on the device "
        "(`tests/ops/test_model.py` allows a factor of 1.4). What the "
        "model leaves out: the host, and clocks that sink under load.\n",
        markdown(rows),
    ]
    write(arguments.output, {"provenance": facts, "rows": rows}, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")
