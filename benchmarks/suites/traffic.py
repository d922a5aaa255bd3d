"""What a converted layer moves through memory, counted operation by operation, with and without the Triton kernels.

    TRITON_INTERPRET=1 python benchmarks/run.py --suite traffic

Every operation that PyTorch dispatches counts what its arguments and results hold; views and allocations count nothing,
nor do parameters, which are small at the lengths of real text. Every kernel counts the tensors over tokens that it
reads, and those that it writes. The unit is U, the bytes of q. No time is measured, and no kernel runs: their results
are only allocated. So it takes seconds on any machine; without a GPU the kernels have to be allowed as for Triton's
interpreter.
"""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from harness import facts_line, markdown, provenance, suite_parser, write
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.errors import BackendError
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops.hybrid.triton import train
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.triton.plan import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = {"window": 64, "sinks": 4}
LAYERS: dict[str, dict[str, Any]] = {
    "elu": {"feature_map": "elu"},
    "elu, window 64": {"feature_map": "elu", **RECIPE},
    "hedgehog": {"feature_map": "hedgehog"},
    "hedgehog, window 64": {"feature_map": "hedgehog", **RECIPE},
    "norm_preserving, window 64": {"feature_map": "norm_preserving", **RECIPE},
    "norm_preserving, window 64, rotation undone (recommended)": {
        "feature_map": "norm_preserving",
        "rotary": "undo",
        **RECIPE,
    },
}
LAYERS |= {
    "window 64 alone": {"mix": "window", **RECIPE},
    "window 64, 64 kept": {"mix": "window", "kept": 64, **RECIPE},
}
RULES = ("decay", "delta", "gated_delta")
LAYERS |= {
    f"norm_preserving, window 64, {rule}": {"feature_map": "norm_preserving", "update_rule": rule, **RECIPE}
    for rule in RULES
}
BESIDE_KERNELS = {"triton_train": train.forward, "triton_train_backward": train.gradients}
"""What runs operations of PyTorch beside kernels, by the names of its ops."""
FREE = ("empty", "new_empty", "_unsafe_view", "_local_scalar_dense", "detach")
FILLS = ("zero_", "new_ones", "new_zeros", "ones", "zeros", "full", "arange", "scalar_tensor")


class Counter(TorchDispatchMode):
    """Count operations and the bytes that they read and write.

    Attributes:
        operations: Operations that move something, of which a call of kernels is one.
        bytes: What they move.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.operations = self.bytes = 0
        self.parameters = {x.untyped_storage().data_ptr() for x in module.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if function.namespace == "hf_linear_attn" and name.startswith("triton"):
            self.operations += 1
            return self._launch(name, function, args, kwargs)
        found = function(*args, **kwargs)
        views = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        if views or name.startswith(FREE):
            return found
        read = [] if name.startswith(FILLS) else tree_leaves((args, kwargs))
        self.operations += 1
        self._move((*read, *tree_leaves(found)))
        return found

    def _launch(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Count an op's kernels, and PyTorch's operations beside them; return its results, as zeros."""
        with patch.object(Launch, "run", lambda launch, _=None: self._move((*launch.reads, *launch.writes))):
            if name in BESIDE_KERNELS:
                with self:
                    found = BESIDE_KERNELS[name](*args, **kwargs)
            else:
                found = function(*args, **kwargs)
        for x in tree_leaves(found):
            x.zero_()
        return found

    def _move(self, tensors: Iterable[Any]) -> None:
        self.bytes += sum(self._size(x) for x in tensors if isinstance(x, Tensor))

    def _size(self, x: Tensor) -> int:
        if x.is_meta:
            return x.nbytes
        storage = x.untyped_storage()
        # An expanded tensor is as large as what it repeats.
        return 0 if storage.data_ptr() in self.parameters else min(x.nbytes, storage.nbytes())


def count(settings: dict[str, Any], backend: str, sizes: Sizes, tokens: int) -> dict[str, Any]:
    """Count one layer's passes over ``tokens`` tokens, and a step of generation after them."""
    config = LinearAttentionConfig(**settings, backend=backend)
    layer = LinearAttention(config, sizes, "layer", rotated=True).to(DEVICE)

    def draw(heads: int) -> Tensor:
        x = torch.randn(1, tokens, heads, sizes.head_dim, device=DEVICE, dtype=torch.bfloat16)
        return x.transpose(1, 2)

    q, k, v = draw(sizes.num_heads), draw(sizes.num_kv_heads), draw(sizes.num_kv_heads)
    turns = torch.randn(1, tokens, sizes.head_dim, device=DEVICE, dtype=torch.bfloat16)
    alone = Call(rotation=Rotation(turns, Layout("half", "pair")))
    row: dict[str, Any] = {}
    with torch.no_grad(), Counter(layer) as found:
        layer(q, k, v, alone)
    row["prefill, U"] = found.bytes / q.nbytes
    leaves, do = [x.detach().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    with Counter(layer) as found:
        layer(*leaves, alone).backward(do)
    row["forward and backward, U"] = found.bytes / q.nbytes
    call = alone._replace(state=State())
    # Counted too, so that no kernel runs.
    with torch.no_grad(), Counter(layer):
        layer(q, k, v, call)
    with torch.no_grad():
        call = call._replace(rotation=Rotation(turns[:, :1], Layout("half", "pair")))
        for _ in range(2):
            with Counter(layer) as found:
                layer(*(x[:, :, :1] for x in (q, k, v)), call)
    return row | {"operations of a step": found.operations}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("traffic", __doc__)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the sequence (%(default)s)")
    parser.add_argument("--heads", type=int, nargs=2, default=(4, 1), metavar=("H", "HKV"), help="heads (4 1)")
    parser.add_argument("--head-dim", type=int, default=128, help="dimensions of a head (%(default)s)")
    arguments = parser.parse_args(argv)
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("Without a GPU `--suite traffic` needs Triton's interpreter: set TRITON_INTERPRET=1.")
    sizes = Sizes(arguments.head_dim, *arguments.heads, 1 / math.sqrt(arguments.head_dim))
    rows = []
    for name, settings in LAYERS.items():
        plain = count(settings, "torch", sizes, arguments.tokens)
        try:
            kernels = count(settings, "triton", sizes, arguments.tokens)
        except BackendError as error:
            print(f"{name}: {error}", flush=True)
            kernels = {}
        row: dict[str, Any] = {"layer": name}
        for what, number in plain.items():
            row |= {f"{what}: PyTorch": number, f"{what}: kernels": kernels.get(what)}
        print(row, flush=True)
        rows.append(row)
    facts = provenance("traffic", argv or [])
    heads, kv_heads = arguments.heads
    parts = [
        "# Counted traffic of a layer\n",
        facts_line(facts),
        f"Counted, not timed: {arguments.tokens} tokens, {heads} query and {kv_heads} key heads of "
        f"{arguments.head_dim} dimensions, bf16, no padding. U is the size of q; to read q and write o alone is 2 U, k "
        f"and v are {2 * kv_heads / heads:g} U. An operation of PyTorch counts its arguments and results "
        "once, and so does each kernel with the tensors over tokens. Linear attention itself is one operation in the "
        "column of PyTorch. Parameters are left out, gradients of them are not. A dash stands where an update rule has "
        "no kernels.\n",
        markdown(rows),
    ]
    write(arguments.output, {"provenance": facts, "rows": rows}, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")
