"""Prompts through `torch.compile`: a converted model as it is, and compiled.

    python benchmarks/run.py --suite compiled

The model has random maps, which cost what learned ones do. It reads each prompt into a new cache; the ways take turns.
On a CPU, without a compiler, a layer reads prompts by loops where Numba is installed; `backend="torch"` is without.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import by_turns, facts_line, markdown, provenance, suite_parser, write
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from hf_linear_attn import patch_model
from hf_linear_attn.patching import cache_argument

RECIPE = {"feature_map": "norm_preserving", "window": 64, "sinks": 4, "rotary": "undo", "layers": "all"}
AUTO, TORCH, COMPILED = "as it is", 'backend="torch"', "compiled"
WARM_UP = 300
"""Length of the prompt that is compiled for, and all others with it."""


def reader(model: Any, called: Callable[..., Any], tokens: int) -> Callable[[], object]:
    """Return what reads a prompt."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=generator).to(model.device)

    def read() -> None:
        with torch.no_grad():
            called(ids, logits_to_keep=1, **cache_argument(model, DynamicCache(config=model.config)))
        if ids.is_cuda:
            torch.cuda.synchronize()

    return read


def load(path: str, device: str, **more: Any) -> nn.Module:
    """Return a converted model that has found how it rotates, which a graph cannot."""
    model = patch_model(AutoModelForCausalLM.from_pretrained(path).eval().to(device), **RECIPE, **more)
    reader(model, model, 8)()
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("compiled", __doc__)
    parser.add_argument("--model", default="examples/teacher", help="softmax model to convert (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 2048), help="lengths of prompts (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timings of which the median counts (%(default)s)")
    parser.add_argument("--backend", default="inductor", help="what compiles (%(default)s)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {AUTO: load(arguments.model, device)}
    if device == "cpu":
        models[TORCH] = load(arguments.model, device, backend="torch")
    compiled = torch.compile(models[AUTO], backend=arguments.backend, fullgraph=True, dynamic=True)
    started = time.perf_counter()
    reader(models[AUTO], compiled, WARM_UP)()
    compiling_s = time.perf_counter() - started
    print(f"compiled in {compiling_s:.0f} s", flush=True)
    facts, rows = provenance("compiled", argv or []), []
    for tokens in arguments.tokens:
        ways = {name: reader(model, model, tokens) for name, model in models.items()}
        ways[COMPILED] = reader(models[AUTO], compiled, tokens)
        times = by_turns(ways, arguments.repeats)
        row: dict[str, Any] = {"tokens": tokens} | {f"{name}, ms": x["median_ms"] for name, x in times.items()}
        rows.append(row | {f"{name}, least": x["min_ms"] for name, x in times.items()})
        print(rows[-1], flush=True)
    parts = [
        "# Compiled prompts\n",
        facts_line(facts),
        f"A prompt of `{arguments.model}`, converted with the recommended settings, in medians of {arguments.repeats} "
        f"calls in turn and in the least; compiling for all lengths took {compiling_s:.0f} s.\n",
        markdown(rows),
    ]
    write(arguments.output, {"provenance": facts, "compiling_s": compiling_s, "rows": rows}, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")
