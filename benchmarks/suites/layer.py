"""A converted attention module beside the softmax module that it was: a token's time, forward and backward, a step's.

    python benchmarks/run.py --suite layer

A Llama-shaped attention module, hidden size 512, 8 heads of 64, 2 key heads, fp32, with projections and rotation, as a
model calls it. Softmax is PyTorch's scaled_dot_product_attention. Everything is measured in turn in one process, as
processor time of one thread, and medians are compared; a step is that of a one-layer model with its cache. What no
layer can go below stands beside it: "projections" are a module's four projections and its rotation alone, "products"
the recommended recipe's products of matrices alone, on tensors that are at hand. "Attention alone" is the part of a
forward between projections and rotation: the call of its attention function. The last table is taken where the
allocator keeps what is freed: else the operating system gives large buffers anew, page by page, and projections pay for
it. Where Numba is installed its loops serve the forward and the steps of all layers with a window that do not delete
what they hold; "PyTorch alone" is the same layer without them. The backward is PyTorch's.
"""

import copy
import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from harness import facts_line, markdown, provenance, suite_parser, write
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_linear_attn import patch_model
from hf_linear_attn.ops.linear_attention.torch import CHUNK
from hf_linear_attn.patching import cache_argument

NO_STATE = {"window": 64, "sinks": 4, "mix": "window"}
SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024}
RECIPE = {"feature_map": "norm_preserving", "window": 64, "sinks": 4, "rotary": "undo"}
LAYERS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "elu": {"feature_map": "elu"},
    "elu, window 64": {"feature_map": "elu", "window": 64, "sinks": 4},
    "recommended": RECIPE,
    "recommended, PyTorch alone": RECIPE | {"backend": "torch"},
    "recommended, rotation kept": RECIPE | {"rotary": "keep"},
    "recommended, gate": RECIPE | {"mix": "gate"},
    **{f"recommended, {rule}": RECIPE | {"update_rule": rule} for rule in ("decay", "delta", "gated_delta")},
    "recommended, 64 kept": RECIPE | {"kept": 64},
    "window alone": NO_STATE,
    "window alone, 64 kept": NO_STATE | {"kept": 64},
    "window alone, 64 kept, learned": NO_STATE | {"kept": 64, "retention": "learned", "retention_units": 16},
}
FLOOR = ("projections", "products")
KEPT = ("softmax", "elu", "recommended", "recommended, PyTorch alone")
"""Kinds that are timed again without their projections, and where memory is kept."""
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


def by_turns(
    functions: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Return each function's median time in seconds, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for n in range(repeats + 1):
        for name, function in functions.items():
            started = clock()
            function()
            if n:
                times[name].append(clock() - started)
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


def floor_calls(tokens: int) -> dict[str, Callable[[], object]]:
    """Return calls of what the forward cannot leave out: :data:`FLOOR`."""
    model = build(None)
    attention: Any = model.model.layers[0].self_attn
    x = torch.randn(1, tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    cos, sin = model.model.rotary_emb(x, torch.arange(tokens)[None])

    @torch.no_grad()
    def projections() -> Tensor:
        q, k, _ = (
            of(x).view(1, tokens, -1, attention.head_dim).transpose(1, 2)
            for of in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return attention.o_proj(q.transpose(1, 2).reshape(1, tokens, -1))

    return dict(zip(FLOOR, (projections, _products(tokens)), strict=True))


def _products(tokens: int) -> Callable[[], object]:
    """Return the recommended recipe's products, span by span: of features, the window and the linear branch."""
    heads, kv_heads = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    dim, span, block, chunk = SIZES["hidden_size"] // heads, 512, 32, CHUNK
    keys = RECIPE["sinks"] + RECIPE["window"] + block
    group, blocks, chunks = heads // kv_heads, span // block, span // chunk
    sizes = [
        (heads, span, dim, dim),
        (kv_heads, span, dim, dim),
        (kv_heads * blocks, group * block, dim, keys),
        (kv_heads * blocks, group * block, keys, dim),
        (kv_heads * chunks, 2 * dim, chunk, dim + 1),
        (kv_heads * chunks, group * chunk, 2 * dim, dim + 1),
        (kv_heads * chunks, group * chunk, 2 * dim, chunk),
        (kv_heads * chunks, group * chunk, chunk, dim + 1),
    ]
    operands = [(torch.rand(b, m, k), torch.rand(b, k, n), torch.empty(b, m, n)) for b, m, k, n in sizes]

    def products() -> None:
        for _ in range(tokens // span):
            for x, y, out in operands:
                torch.bmm(x, y, out=out)

    return products


def keep_memory() -> None:
    """Let the C library's allocator keep all memory that is freed, where it is glibc's."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        # M_MMAP_MAX and M_TRIM_THRESHOLD: no buffer has a mapping of its own, and the heap does not shrink.
        library.mallopt(-4, 0)
        library.mallopt(-1, 2**31 - 1)


def step_calls(
    models: dict[str, LlamaForCausalLM], context: int, rows: int, steps: int
) -> dict[str, Callable[[], object]]:
    """Return calls that generate so many tokens after a context, each from the same state."""
    ids = torch.randint(0, 64, (rows, context), generator=torch.Generator().manual_seed(0))

    def call(model: LlamaForCausalLM) -> Callable[[], object]:
        first = DynamicCache(config=model.config)
        with torch.no_grad():
            for start in range(0, context, 1024):
                model.model(ids[:, start : start + 1024], **cache_argument(model, first))

        def timed() -> None:
            cache = cache_argument(model, copy.deepcopy(first))
            started = time.process_time()
            with torch.no_grad():
                for _ in range(steps):
                    model(ids[:, :1], **cache)
            spent.append(time.process_time() - started)

        spent: list[float] = []
        timed.spent = spent  # type: ignore[attr-defined]
        return timed

    return {name: call(model) for name, model in models.items()}


@contextmanager
def attention_clock(models: Iterable[LlamaForCausalLM]) -> Iterator[Callable[[], float]]:
    """Return a clock that runs only in the models' attention functions, within the block."""
    spent, functions = 0.0, {name: ALL_ATTENTION_FUNCTIONS[name] for name in {implementation(x) for x in models}}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            nonlocal spent
            started = time.process_time()
            found = function(*arguments, **settings)
            spent += time.process_time() - started
            return found

        return call

    try:
        for name, function in functions.items():
            AttentionInterface.register(name, timed(function))
        yield lambda: spent
    finally:
        for name, function in functions.items():
            AttentionInterface.register(name, function)


def implementation(model: LlamaForCausalLM) -> str:
    """Return the name of a model's attention function."""
    return str(model.config._attn_implementation)


def time_modules(
    lengths: Sequence[int], both: bool, repeats: int, kinds: Sequence[str] = tuple(LAYERS), *, alone: bool = False
) -> list[dict[str, Any]]:
    """Time kinds of modules at each length, and beside their forward what it cannot leave out; or attention alone."""
    models, rows = {name: build(LAYERS[name]) for name in kinds}, []
    with attention_clock(models.values()) if alone else nullcontext(time.process_time) as clock:
        for tokens in lengths:
            # Softmax's time grows with the square of the length.
            known = {name: model for name, model in models.items() if tokens <= 16384 or name != "softmax"}
            calls = module_calls(known, tokens, both) | ({} if both or alone else floor_calls(tokens))
            times = by_turns(calls, repeats if tokens < 8192 else max(repeats // 3, 2), clock)
            row: dict[str, Any] = {"tokens": tokens} | {f"{name}, us": x / tokens * 1e6 for name, x in times.items()}
            if "softmax" in times:
                row |= {f"{name}, times as fast": times["softmax"] / times[name] for name in times if name in kinds[1:]}
            print(row, flush=True)
            rows.append(row)
    return rows


def time_steps(repeats: int, steps: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Time a step of kinds of models after each context."""
    found = []
    for rows in ROWS:
        for context in STEPS:
            if rows * context > 2**17:
                continue
            calls = step_calls({name: build(LAYERS[name]) for name in kinds}, context, rows, steps)
            by_turns(calls, repeats)
            times = {name: statistics.median(x.spent[1:]) / steps for name, x in calls.items()}  # type: ignore[attr-defined]
            row: dict[str, Any] = {"batch": rows, "context": context}
            row |= {f"{name}, us": x * 1e6 for name, x in times.items()}
            if "softmax" in times:
                row |= {f"{name}, of softmax": x / times["softmax"] for name, x in times.items() if name in kinds[1:]}
            print(row, flush=True)
            found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("layer", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 16384, 65536], help="tokens of a call")
    parser.add_argument("--repeats", type=int, default=9, help="timings of which the median counts (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="tokens generated in one timing (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=("forward", "both", "steps"), default=["forward", "both", "steps"])
    parser.add_argument("--kinds", nargs="+", choices=LAYERS, default=list(LAYERS), help="layers (default: all)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    kinds, again = arguments.kinds, [name for name in KEPT if name in arguments.kinds]
    facts = provenance("layer", argv or [])
    result: dict[str, Any] = {"provenance": facts}
    if "forward" in arguments.only:
        result["forward"] = time_modules(arguments.lengths, False, arguments.repeats, kinds)
        alone = again or kinds
        result["attention alone"] = time_modules(arguments.lengths, False, arguments.repeats, alone, alone=True)
    if "both" in arguments.only:
        lengths = [n for n in arguments.lengths if n in BOTH]
        result["forward and backward"] = time_modules(lengths, True, arguments.repeats, kinds)
    if "steps" in arguments.only:
        result["step"] = time_steps(arguments.repeats, arguments.steps, kinds)
    parts = ["# A layer on a CPU\n", facts_line(facts)]
    parts.append(
        " ".join((__doc__ or "").split("\n\n")[-1].split()) + " Times are microseconds of a token or a step.\n"
    )
    if "forward" in arguments.only and again:
        keep_memory()
        result["forward, memory kept"] = time_modules(arguments.lengths, False, arguments.repeats, again)
    for name in ("forward", "attention alone", "forward and backward", "step", "forward, memory kept"):
        if name in result:
            parts += [f"## {name.capitalize()}\n", markdown(result[name])]
    write(arguments.output, result, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")
