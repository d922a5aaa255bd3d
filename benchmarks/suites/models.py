"""Whole models, softmax and patched: prefill, decode, how many sequences fit, and a training step, by context length.

    python benchmarks/run.py --suite models --shapes llama-8b --output docs/results/models.json

Models have the shape of known ones and random weights. Every figure is kept in the output as soon as it is measured,
and the same command goes on from there. Prefill reads one sequence into a growing cache; softmax in one piece, patched
models in pieces of `--chunk`. `compiled` does the same by one compiled graph. Decode is `generate` with a static cache,
token by token as a streamer sees it, compiled and replayed as a graph where Transformers does so; softmax's cache is
filled with random keys and values, since reading so long a prompt into a static cache takes a mask of T^2. A training
step is a forward and a backward of all layers with recomputed activations, without the vocabulary's logits and the
optimiser's step, which are the same for all; of all weights, or with `--adapters` of what distillation on one GPU
trains of a converted model. `compiled-training` does the same with layers that Accelerate compiles one by one. The
batch that fits is that of a decode step over caches of full length; reading the prompts takes more.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from accelerate.utils import compile_regions
from harness import earlier, facts_line, markdown, provenance, spread, suite_parser, write
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from hf_linear_attn import patch_model, unpatch_model
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.lora import add_lora
from hf_linear_attn.distill.run import recompute_activations
from hf_linear_attn.evaluation.generation import forward, is_out_of_memory, prefill
from hf_linear_attn.evaluation.meters import cache_bytes, peak_memory_mib, timed
from hf_linear_attn.patching import cache_argument, is_patched

LONGEST = 2**20
SOFTMAX = "softmax"
VARIANTS: dict[str, dict[str, Any]] = {
    SOFTMAX: {},
    "elu": {"feature_map": "elu"},
    "hedgehog, window 64": {"feature_map": "hedgehog", "window": 64},
    "recommended": {"feature_map": "norm_preserving", "rotary": "undo", "window": 64, "sinks": 4},
    "kept keys": {"window": 64, "sinks": 4, "kept": 64, "mix": "window", "retention": "learned", "retention_units": 16},
}
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-8b": lambda: LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LONGEST,
    ),
    "gpt2": lambda: GPT2Config(n_positions=LONGEST),
    "tiny": lambda: LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    ),
}
DEFAULTS = DistillationSettings()
"""Of distillation, such as the rank of adapters."""
PARTS = ("prefill", "compiled", "decode", "batch", "training", "compiled-training")


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note a token; the prompt counts as the first."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left over."""


class Bench:
    """The measurements of one model.

    Args:
        model: The model, patched or not.
        arguments: The suite's.
    """

    def __init__(self, model: PreTrainedModel, arguments: argparse.Namespace) -> None:
        self.model, self.arguments = model, arguments
        self.device: torch.device = model.device

    def draw(self, tokens: int, batch: int = 1) -> Tensor:
        """Draw token ids ``[batch, tokens]``."""
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, self.model.config.vocab_size, (batch, tokens), generator=generator)
        return ids.to(self.device)

    def times_ms(self, run: Callable[[], object]) -> list[float]:
        """Time a call as often as its budget allows, after one that compiles what there is to compile."""
        budget_ms = 1e3 * self.arguments.seconds
        run()
        times = [timed(self.device, run)]
        while sum(times) < budget_ms / 2 and len(times) < self.arguments.repeats:
            times.append(timed(self.device, run))
        return times

    @torch.inference_mode()
    def prefill(self, tokens: int, *, compiled: bool = False) -> dict[str, Any]:
        """Read a prompt."""
        ids = self.draw(tokens)
        chunk = self.arguments.chunk if is_patched(self.model) else tokens
        kept: list[Any] = []
        model = self.model
        if compiled:
            torch._dynamo.reset()
            # How a layer rotates is found in a call, which a graph cannot.
            prefill(model, ids[:, :8], None, chunk)
            model = torch.compile(model, fullgraph=True)

        def read() -> None:
            kept[:] = [prefill(model, ids, None, chunk)[1]]

        found = spread(self.times_ms(read))
        found |= {"tokens_per_s": 1e3 * tokens / found["median_ms"], "cache_bytes": cache_bytes(kept[0])}
        kept.clear()
        if not compiled:
            # What counts a CPU's memory goes into no graph.
            found["peak_mib"], found["peak_method"] = peak_memory_mib(self.device, read)
        return found

    def compiled(self, tokens: int) -> dict[str, Any]:
        """Read a prompt by one compiled graph."""
        return self.prefill(tokens, compiled=True)

    @torch.inference_mode()
    def decode(self, tokens: int) -> dict[str, Any]:
        """Generate after a context."""
        # Compiling and capturing take the first tokens.
        counted = self.arguments.decode_tokens
        new = self.arguments.decode_warm_up + counted + 1
        torch._dynamo.reset()
        cache = self.static_cache(tokens + new)
        ids = self.draw(tokens + 1, self.arguments.decode_batch)
        if is_patched(self.model):
            prefill(self.model, ids[:, :-1], cache, self.arguments.chunk)
        else:
            self.fill(cache, tokens, len(ids))
        clock = Clock()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **cache_argument(self.model, cache),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
        )
        steps = [1e3 * (after - before) for before, after in pairwise(clock.times)]
        return spread(steps[-counted:]) | {"cache_bytes": cache_bytes(cache)}

    @torch.inference_mode()
    def batch(self, tokens: int) -> dict[str, Any]:
        """Find how many sequences of so long a context fit while they decode."""

        def fits(batch: int) -> bool:
            try:
                cache = self.static_cache(tokens)
                forward(self.model, self.draw(1, batch), cache, all_logits=False)
                forward(self.model, self.draw(1, batch), cache, all_logits=False)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return False
            finally:
                cache = None
                release()
            return True

        most = self.arguments.most_batch
        good, bad = 0, 1
        while bad <= most and fits(bad):
            good, bad = bad, 2 * bad
        # To within an eighth.
        while bad <= most and bad - good > max(1, good // 8):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return {"sequences": good, "limited_by_memory": bad <= most}

    def training(self, tokens: int, *, compiled: bool = False) -> dict[str, Any]:
        """Run a training step."""
        recompute_activations(self.model, True)
        self.model.train()
        ids, model = self.draw(tokens), self.model.base_model
        if compiled:
            torch._dynamo.reset()
            # As with prompts.
            model(input_ids=ids[:, :8], use_cache=False)
            model = compile_regions(model)

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            hidden = model(input_ids=ids, use_cache=False).last_hidden_state
            hidden.float().square().mean().backward()

        try:
            found = spread(self.times_ms(step))
            self.model.zero_grad(set_to_none=True)
            peak, method = peak_memory_mib(self.device, step)
        finally:
            self.model.zero_grad(set_to_none=True)
            self.model.eval()
        return found | {"peak_mib": peak, "peak_method": method}

    def compiled_training(self, tokens: int) -> dict[str, Any]:
        """Run a training step whose layers are compiled."""
        return self.training(tokens, compiled=True)

    def static_cache(self, tokens: int) -> StaticCache:
        """Return an empty cache for so many tokens."""
        return StaticCache(config=self.model.config, max_cache_len=tokens)

    def fill(self, cache: StaticCache, tokens: int, batch: int) -> None:
        """Put random keys and values of some sequences into a softmax cache."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in cache.layers:
            shape = (batch, heads, tokens, head_dim)
            layer.update(*(torch.randn(shape, dtype=self.model.dtype, device=self.device) for _ in range(2)))


def release() -> None:
    """Give back memory that nothing holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of that shape with random weights."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype, attn_implementation="sdpa")
    return model.eval()


class Cell(NamedTuple):
    """One figure."""

    shape: str
    variant: str
    part: str
    tokens: int

    @property
    def key(self) -> str:
        """Its name in the result."""
        return "/".join(map(str, self))


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield all that is measured; cells of one model follow on each other."""
    lengths = {
        "prefill": arguments.lengths,
        "compiled": arguments.lengths,
        "decode": arguments.decode_lengths,
        "batch": [arguments.batch_length],
        "training": arguments.training_lengths,
        "compiled-training": arguments.training_lengths,
    }
    for shape in arguments.shapes:
        for variant in arguments.variants:
            for part in arguments.parts:
                for tokens in lengths[part]:
                    if variant != SOFTMAX or tokens <= arguments.longest_softmax:
                        yield Cell(shape, variant, part, tokens)


def run(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure every cell that the result does not hold yet, and write the result after each."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    missing = (cell for cell in cells(arguments) if cell.key not in result["cells"])
    for shape, of_shape in groupby(missing, lambda cell: cell.shape):
        model = build(shape, device, dtype)
        for variant, of_variant in groupby(of_shape, lambda cell: cell.variant):
            if is_patched(model):
                unpatch_model(model)
            adapters = None
            if variant != SOFTMAX:
                patch_model(model, **VARIANTS[variant])
                if arguments.adapters:
                    adapters = add_lora(model, rank=DEFAULTS.lora_rank, alpha=DEFAULTS.lora_alpha)
            for cell in of_variant:
                try:
                    found = {
                        "status": "ok",
                        **getattr(Bench(model, arguments), cell.part.replace("-", "_"))(cell.tokens),
                    }
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    found = {"status": "out of memory"}
                release()
                result["cells"][cell.key] = cell._asdict() | {"commit": result["provenance"]["commit"]} | found
                write(arguments.output, result, page(result))
                print(f"{cell.key}: {found}", flush=True)
            if adapters is not None:
                adapters.unload()
        # Two models at a time may not fit.
        del model
        release()


def page(result: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    rows = list(result["cells"].values())
    lines = [
        "# Whole models\n",
        facts_line(result["provenance"]),
        f"Commits: {', '.join(sorted({str(row['commit'])[:10] for row in rows}))}. "
        "Random weights. *x softmax*: softmax's time over this one's. Not run: softmax beyond "
        f"{result['settings']['longest_softmax']:,} tokens; what is missing below.\n",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for part in PARTS:
            table = [_row(row, rows) for row in rows if (row["shape"], row["part"]) == (shape, part)]
            if table:
                lines += [f"## {shape}: {part}\n", markdown(table)]
    return "\n".join(lines)


def _row(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a line of a table, compared with softmax at the same length and with the shortest length."""

    def other(**changes: Any) -> Mapping[str, Any] | None:
        wanted = {name: row[name] for name in ("shape", "variant", "part", "tokens")} | changes
        found = (x for x in rows if x["status"] == "ok" and all(x[name] == value for name, value in wanted.items()))
        return next(found, None)

    line: dict[str, Any] = {"model": row["variant"], "tokens": row["tokens"]}
    if row["status"] != "ok":
        return line | {"status": row["status"]}
    if row["part"] == "batch":
        return line | {"sequences": row["sequences"], "limited by memory": row["limited_by_memory"]}
    low, high = row["iqr_ms"]
    line |= {"ms": row["median_ms"], "quartiles": f"{low:.4g} - {high:.4g}", "repeats": row["repeats"]}
    softmax = other(variant=SOFTMAX)
    line["x softmax"] = softmax["median_ms"] / row["median_ms"] if softmax else None
    if row["part"] == "decode":
        shortest = min(x["tokens"] for x in rows if all(x[n] == row[n] for n in ("shape", "variant", "part")))
        first = other(tokens=shortest)
        line[f"over that at {shortest}"] = row["median_ms"] / first["median_ms"] if first else None
    if "tokens_per_s" in row:
        line["tokens/s"] = row["tokens_per_s"]
    if "peak_mib" in row:
        line["peak above weights, MiB"] = row["peak_mib"]
    if "cache_bytes" in row:
        line["cache, MiB"] = row["cache_bytes"] / 2**20
    if row["part"] == "prefill" and softmax:
        line["in tokens of softmax cache"] = row["cache_bytes"] * row["tokens"] / softmax["cache_bytes"]
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("models", __doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["gpt2", "llama-8b"], help="gpt2 and llama-8b by default")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="all by default")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    add("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 131072, 262144, LONGEST], help="of prompts")
    add("--decode-lengths", type=int, nargs="+", default=[1024, 32768, 131072], help="contexts of decode")
    add("--training-lengths", type=int, nargs="+", default=[8192, 32768], help="of training steps")
    add("--batch-length", type=int, default=32768, help="context of the batch that fits (%(default)s)")
    add("--most-batch", type=int, default=4096, help="largest batch tried (%(default)s)")
    add("--longest-softmax", type=int, default=262144, help="longest sequence of softmax (%(default)s)")
    add("--chunk", type=int, default=131072, help="tokens that a patched model reads at once (%(default)s)")
    add("--decode-tokens", type=int, default=32, help="steps of which the median counts (%(default)s)")
    add("--decode-batch", type=int, default=1, help="sequences that a step decodes at a time (%(default)s)")
    add("--decode-warm-up", type=int, default=12, help="steps before them (%(default)s)")
    add("--adapters", action="store_true", help="freeze all but adapters, feature maps and mixing weights")
    add("--repeats", type=int, default=10, help="timings of which the median counts (%(default)s)")
    add("--seconds", type=float, default=10.0, help="that the timings of one figure may take (%(default)s)")
    add("--device", default="cuda", help="device (%(default)s)")
    add("--dtype", default="bfloat16", help="of weights (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("`--suite models` needs a CUDA or ROCm GPU, and torch sees none. Pass `--device cpu` to try it.")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output", "shapes", "variants")}
    facts = provenance("models", argv or [])
    known = earlier(arguments.output, facts).get("cells", {})
    result: dict[str, Any] = {"provenance": facts, "settings": settings, "cells": known}
    torch.manual_seed(0)
    run(arguments, result)
    print(f"wrote {arguments.output} and .md")
