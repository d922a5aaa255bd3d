"""Processor time that the host takes for calls of kernels, whose launches are left out.

    TRITON_INTERPRET=1 python benchmarks/run.py --suite host

A GPU waits for whatever the host does between two launches. Here nothing is launched: tensors lie on the CPU, plans are
those for an H100, and in place of what Triton compiled stands a function that returns at once. What is timed is all
else of a call that is like one before: checks, the choice of a backend, allocations, and the arguments of launches.
Processor time of one thread, the least of many short batches, all rows in turn, so that a noisy machine takes from all
alike. An allocation and a plain loop stand beside them, to compare machines by.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import facts_line, markdown, provenance, suite_parser, write
from torch import Tensor

from hf_linear_attn import LinearAttentionConfig, linear_attention
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops import dispatch
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.triton import run
from hf_linear_attn.ops.triton.plan import Launch, Target
from hf_linear_attn.ops.window import window_attention

RECOMMENDED = {"feature_map": "norm_preserving", "rotary": "undo", "window": 64, "sinks": 4}
BATCH = 25
"""Calls per batch: long beside the clock's resolution, short beside what disturbs a machine."""


class Compiled:
    """Stands for what Triton compiled."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: None


def launch_nothing() -> None:
    """Plan for an H100, and launch nothing."""
    Launch.run = lambda self, arguments=None: Compiled()  # type: ignore[method-assign]
    run.target_of = lambda device: Target("sm_90", 132)  # type: ignore[attr-defined]
    dispatch._obstacle = lambda device: None


def operations(tokens: int, heads: int, kv_heads: int, dim: int) -> dict[str, Callable[[], object]]:
    """Return calls of operations."""

    def draw(count: int, size: int, tokens: int = tokens) -> Tensor:
        return torch.zeros(1, tokens, count, size, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v, mask = draw(heads, dim), draw(kv_heads, dim), draw(kv_heads, dim), torch.ones(1, tokens, dtype=torch.bool)
    wide_q, wide_k, one = draw(heads, 2 * dim), draw(kv_heads, 2 * dim), [x[:, :, :1] for x in (q, k, v)]
    elu = get_feature_map("elu", dim, heads, kv_heads)
    state = decode_state(1, kv_heads, dim, dim, device="cpu")
    do, leaves = draw(heads, dim), [x.detach().requires_grad_() for x in (q, k, v)]
    masked: dict[str, Any] = {"key_mask": mask, "delay": 64, "backend": "triton"}

    def train() -> None:
        with torch.enable_grad():
            torch.autograd.grad(linear_attention(*leaves, elu, backend="triton")[0], leaves, do)

    return {
        "forward": lambda: linear_attention(q, k, v, elu, backend="triton"),
        "forward, masked and delayed": lambda: linear_attention(q, k, v, elu, **masked),
        f"the same of {2 * dim} features": lambda: linear_attention(wide_q, wide_k, v, None, **masked),
        "forward and backward": train,
        "window": lambda: window_attention(q, k, v, window=64, scaling=0.1, key_mask=mask, backend="triton"),
        "step of sums": lambda: decode_step_(*one, state, backend="triton"),
    }


def layers(tokens: int, heads: int, kv_heads: int, dim: int) -> dict[str, Callable[[], object]]:
    """Return calls of the recommended layer."""
    config = LinearAttentionConfig(**RECOMMENDED, backend="triton")
    layer = LinearAttention(config, Sizes(dim, heads, kv_heads, 1 / math.sqrt(dim)), "layer", rotated=True)
    # Gradients of weights are products, which a CPU would compute.
    layer.requires_grad_(False)
    q, k, v = (
        torch.zeros(1, tokens, n, dim, dtype=torch.bfloat16).transpose(1, 2) for n in (heads, kv_heads, kv_heads)
    )
    turns, one = torch.zeros(1, tokens, dim, dtype=torch.bfloat16), [x[:, :, :1] for x in (q, k, v)]

    def call(state: State | None, tokens: int) -> Call:
        return Call(state=state, rotation=Rotation(turns[:, :tokens], Layout("half", "pair")))

    stepping = call(State(), tokens)
    layer(q, k, v, stepping)
    stepping = stepping._replace(rotation=call(None, 1).rotation)
    leaves, do = [x.detach().requires_grad_() for x in (q, k, v)], torch.zeros_like(q)

    compiled = torch.compile(layer, fullgraph=True)

    def train(layer: Callable[..., Tensor]) -> None:
        with torch.enable_grad():
            torch.autograd.grad(layer(*leaves, call(None, tokens)), leaves, do)

    return {
        "recommended layer, a text": lambda: layer(q, k, v, call(None, tokens)),
        "recommended layer, a text into a new state": lambda: layer(q, k, v, call(State(), tokens)),
        "recommended layer, a step": lambda: layer(*one, stepping),
        "recommended layer, weights frozen, forward and backward": lambda: train(layer),
        "the same, compiled": lambda: train(compiled),
    }


def least(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the least processor time of each call, in microseconds."""
    best = dict.fromkeys(calls, float("inf"))
    for function in calls.values():
        # Planned, and repeated once.
        function()
        function()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, function in calls.items():
            started = time.thread_time()
            for _ in range(BATCH):
                function()
            best[name] = min(best[name], (time.thread_time() - started) / BATCH * 1e6)
    return best


def loop() -> None:
    """Do what takes Python some tens of microseconds."""
    total = 0
    for i in range(1000):
        total += i


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("host", __doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a text (%(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a layer's text (%(default)s)")
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), metavar=("H", "HKV"), help="heads (8 2)")
    parser.add_argument("--head-dim", type=int, default=128, help="dimensions of a head (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="time to measure for (%(default)s)")
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("`--suite host` calls kernels with tensors on the CPU: set TRITON_INTERPRET=1.")
    torch.set_num_threads(1)
    launch_nothing()
    sizes = *arguments.heads, arguments.head_dim
    with torch.no_grad():
        calls = operations(arguments.tokens, *sizes) | layers(arguments.prompt, *sizes)
        small = torch.empty(1)
        units = {"an allocation": lambda: torch.empty_like(small), "a loop of 1,000 additions": loop}
        found = least(units | calls, arguments.seconds)
    rows = [{"call": name, "us": round(us, 1)} for name, us in found.items()]
    facts = provenance("host", argv or [])
    heads, kv_heads = arguments.heads
    parts = [
        "# What the host takes for a call of kernels\n",
        facts_line(facts),
        f"Processor time of one thread, launches left out: {arguments.tokens:,} tokens, in a layer "
        f"{arguments.prompt:,}, {heads} query and {kv_heads} key heads of {arguments.head_dim} dimensions, bf16, plans "
        "for an H100. Every call is like one before it. A layer's operations of PyTorch run on the CPU, on what a "
        "prompt so short holds. The first two rows compare machines.\n",
        markdown(rows),
    ]
    write(arguments.output, {"provenance": facts, "rows": rows}, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")
