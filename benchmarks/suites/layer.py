"""A converted attention module beside the softmax module that it was: a token's time, forward and backward, a step's.

    python benchmarks/run.py --suite layer

A Llama-shaped attention module, hidden size 512, 8 heads of 64, 2 key heads, fp32, with projections and rotation, as a
model calls it. Softmax is PyTorch's scaled_dot_product_attention. Everything is measured in turn in one process, as
processor time of one thread, and medians are compared; a step is that of a one-layer model with its cache.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import facts_line, markdown, provenance, write
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_linear_attn import patch_model

SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024}
RECIPE = {"feature_map": "norm_preserving", "window": 64, "sinks": 4}
LAYERS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "elu": {"feature_map": "elu"},
    "elu, window 64": {"feature_map": "elu", "window": 64, "sinks": 4},
    "recommended": RECIPE,
    "recommended, gate": RECIPE | {"mix": "gate"},
    **{f"recommended, {rule}": RECIPE | {"update_rule": rule} for rule in ("decay", "delta", "gated_delta")},
}
BOTH = (512, 2048, 16384)
"""Lengths at which forward and backward are timed together."""
ROWS = (1, 8)
STEPS = (64, 16384)
"""Context lengths at which a step is timed."""


def build(settings: dict[str, Any] | None) -> LlamaForCausalLM:
    """Build a one-layer model, patched as told."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, max_position_embeddings=2**20, **SIZES)
    model = LlamaForCausalLM(config).eval()
    return model if settings is None else patch_model(model, **settings)


def by_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return each function's median processor time in seconds, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for n in range(repeats + 1):
        for name, function in functions.items():
            started = time.process_time()
            function()
            if n:
                times[name].append(time.process_time() - started)
    return {name: statistics.median(x) for name, x in times.items()}


def module_calls(models: dict[str, LlamaForCausalLM], tokens: int, both: bool) -> dict[str, Callable[[], object]]:
    """Return calls of each model's attention module over so many tokens."""
    x = torch.randn(1, tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))

    def call(model: LlamaForCausalLM) -> Callable[[], object]:
        attention: nn.Module = model.model.layers[0].self_attn
        rotation = model.model.rotary_emb(x, torch.arange(tokens)[None])

        def forward() -> Tensor:
            return attention(x, position_embeddings=rotation, attention_mask=None)[0]

        def timed() -> None:
            if not both:
                with torch.no_grad():
                    forward()
                return
            model.zero_grad(set_to_none=True)
            forward().sum().backward()

        return timed

    return {name: call(model) for name, model in models.items()}


def step_calls(
    models: dict[str, LlamaForCausalLM], context: int, rows: int, steps: int
) -> dict[str, Callable[[], object]]:
    """Return calls that generate so many tokens after a context, each from the same state."""
    ids = torch.randint(0, 64, (rows, context), generator=torch.Generator().manual_seed(0))

    def call(model: LlamaForCausalLM) -> Callable[[], object]:
        first = DynamicCache(config=model.config)
        with torch.no_grad():
            for start in range(0, context, 1024):
                model.model(ids[:, start : start + 1024], past_key_values=first)

        def timed() -> None:
            cache = copy.deepcopy(first)
            started = time.process_time()
            with torch.no_grad():
                for _ in range(steps):
                    model(ids[:, :1], past_key_values=cache)
            spent.append(time.process_time() - started)

        spent: list[float] = []
        timed.spent = spent  # type: ignore[attr-defined]
        return timed

    return {name: call(model) for name, model in models.items()}


def time_modules(lengths: Sequence[int], both: bool, repeats: int) -> list[dict[str, Any]]:
    """Time every kind of module at each length."""
    models, rows = {name: build(settings) for name, settings in LAYERS.items()}, []
    for tokens in lengths:
        # Softmax's time grows with the square of the length.
        known = {name: model for name, model in models.items() if tokens <= 16384 or name != "softmax"}
        times = by_turns(module_calls(known, tokens, both), repeats if tokens < 8192 else max(repeats // 3, 2))
        row: dict[str, Any] = {"tokens": tokens} | {f"{name}, us": x / tokens * 1e6 for name, x in times.items()}
        if "softmax" in times:
            row |= {f"{name}, times as fast": times["softmax"] / times[name] for name in times if name != "softmax"}
        print(row, flush=True)
        rows.append(row)
    return rows


def time_steps(repeats: int, steps: int) -> list[dict[str, Any]]:
    """Time a step of every kind of model after each context."""
    found = []
    for rows in ROWS:
        for context in STEPS:
            if rows * context > 2**17:
                continue
            calls = step_calls({name: build(settings) for name, settings in LAYERS.items()}, context, rows, steps)
            by_turns(calls, repeats)
            times = {name: statistics.median(x.spent[1:]) / steps for name, x in calls.items()}  # type: ignore[attr-defined]
            row: dict[str, Any] = {"batch": rows, "context": context}
            row |= {f"{name}, us": x * 1e6 for name, x in times.items()}
            row |= {f"{name}, of softmax": x / times["softmax"] for name, x in times.items() if name != "softmax"}
            print(row, flush=True)
            found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = argparse.ArgumentParser(
        prog="run.py --suite layer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/layer.json"), help="result (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 16384, 65536], help="tokens of a call")
    parser.add_argument("--repeats", type=int, default=9, help="timings of which the median counts (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="tokens generated in one timing (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=("forward", "both", "steps"), default=["forward", "both", "steps"])
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = provenance("layer", argv or [])
    result: dict[str, Any] = {"provenance": facts}
    if "forward" in arguments.only:
        result["forward"] = time_modules(arguments.lengths, False, arguments.repeats)
    if "both" in arguments.only:
        lengths = [n for n in arguments.lengths if n in BOTH]
        result["forward and backward"] = time_modules(lengths, True, arguments.repeats)
    if "steps" in arguments.only:
        result["step"] = time_steps(arguments.repeats, arguments.steps)
    parts = ["# A layer on a CPU\n", facts_line(facts)]
    parts.append(
        " ".join((__doc__ or "").split("\n\n")[-1].split()) + " Times are microseconds of a token or a step.\n"
    )
    for name in ("forward", "forward and backward", "step"):
        if name in result:
            parts += [f"## {name.capitalize()}\n", markdown(result[name])]
    write(arguments.output, result, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")
