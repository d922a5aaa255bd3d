"""What ``hf-linear-attn check`` computes: problems of the sizes of real models, drawn with a fixed seed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.layers import Call, LinearAttention, State
from hf_linear_attn.layers import Sizes as LayerSizes
from hf_linear_attn.ops.delta_rule import DeltaRuleState, delta_rule, delta_step_
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.linear_attention import linear_attention
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.state import LinearAttentionState
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.window import KeptKeys, OwnKey, window_attention

WINDOW, SINKS = 64, 4

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """Something to compute.

    Attributes:
        name: What it is, for people.
        inputs: Tensors that gradients are taken by, in the dtype that is checked.
        compute: Returns results by name, from the inputs and a backend's name; differentiable where ``backward``.
        backward: Whether it has gradients.
    """

    name: str
    inputs: Tensors
    compute: Callable[[Tensors, str], Tensors]
    backward: bool = True


@dataclass(frozen=True)
class Sizes:
    """How large the problems are.

    Attributes:
        tokens: Tokens of most.
        long: Tokens of the one whose sequence is cut into segments on most GPUs.
        D: Head size; features have twice as many.
        odd: A head size that is no power of two.
    """

    tokens: int
    long: int
    D: int
    odd: int


ON_GPU = Sizes(700, 4_100, 128, 80)
ON_CPU = Sizes(300, 2_100, 64, 40)
INTERPRETED = Sizes(90, 1_100, 16, 24)


class _Draw:
    """Draws tensors of one device and dtype, one after the other, from a fixed seed; most have so many tokens."""

    def __init__(self, device: torch.device, dtype: torch.dtype, count: int) -> None:
        self.device, self.dtype, self.count = device, dtype, count
        self.generator = torch.Generator(device).manual_seed(0)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype or self.dtype)

    def tokens(self, heads: int, dim: int, count: int | None = None, batch: int = 2) -> Tensor:
        # Laid out as projections leave them.
        return self.tensor(batch, count or self.count, heads, dim).transpose(1, 2)

    def qkv(self, D: int, V: int | None = None, count: int | None = None, batch: int = 2, heads: int = 4) -> Tensors:
        shapes = {"q": (heads, D), "k": (heads // 2, D), "v": (heads // 2, V or D)}
        return {name: self.tokens(*shape, count, batch) for name, shape in shapes.items()}

    def state(self, D: int, V: int) -> Tensors:
        kv = self.tensor(2, 2, D, V, dtype=torch.float32)
        return {"kv0": kv, "z0": 1 + self.tensor(2, 2, D, dtype=torch.float32).abs()}


def parts(device: torch.device, dtype: torch.dtype, sizes: Sizes, *, full: bool = False) -> Iterator[Part]:
    """Draw the problems.

    Args:
        device: Where.
        dtype: Dtype of queries, keys and values.
        sizes: How large they are.
        full: Whether to draw more than the recommended recipe.
    """
    D, count = sizes.D, sizes.tokens
    draw = _Draw(device, dtype, count)

    def linear(name: str, inputs: Tensors, **settings: Any) -> Part:
        return Part(name, inputs, partial(_linear, **settings))

    mask = torch.rand(2, count, generator=draw.generator, device=device) > 0.2
    yield from _feature_parts(draw, D)
    yield linear(
        f"linear attention of {2 * D} features, masked, delayed, from a state",
        _features(draw.qkv(2 * D, D)) | draw.state(2 * D, D),
        feature_map=None,
        key_mask=mask,
        delay=WINDOW,
    )
    yield _window_part(draw, D)
    yield _step_part(draw, 2 * D, D)
    yield _layer_part(draw, D)
    yield linear(f"one sequence of {sizes.long} tokens, elu", draw.qkv(D, count=sizes.long, batch=1, heads=2))
    bounds = torch.tensor([0, 1, count // 3, count // 3, count], device=device)
    yield linear("packed sequences, elu", draw.qkv(D, batch=1), cu_seqlens=bounds)
    if not full:
        return
    yield _kept_part(draw, D)
    yield _layer_part(draw, D, kept=min((count - WINDOW - SINKS) // 2, WINDOW))
    yield linear("both directions, elu", draw.qkv(D), causal=False)
    yield linear(f"heads of {sizes.odd}, elu, delayed", draw.qkv(sizes.odd), delay=WINDOW)
    yield linear("values wider than heads, squared_relu", draw.qkv(D, 2 * D), feature_map="squared_relu")
    gates = {name: draw.tensor(2, count, 2).transpose(1, 2) for name in ("beta", "decay")}
    delta = draw.qkv(D) | gates | {"kv0": draw.state(D, D)["kv0"]}
    rule = partial(_delta, key_mask=mask, delay=WINDOW)
    yield Part(f"gated delta rule of {D}, masked, delayed, from a state", delta, rule)
    # A step at a time from the same state.
    delta = {name: x if name == "kv0" else x[:, :, :3] for name, x in delta.items()}
    yield Part("steps of the gated delta rule", delta, _delta_steps, backward=False)


def _features(x: Tensors) -> Tensors:
    # As those of the recommended map they are not negative, so that the normaliser does not vanish.
    return x | {name: x[name].abs() for name in ("q", "k")}


def _linear(x: Tensors, backend: str, **settings: Any) -> Tensors:
    state = LinearAttentionState(x["kv0"], x["z0"]) if "kv0" in x else None
    o, final = linear_attention(x["q"], x["k"], x["v"], state=state, backend=backend, **settings)
    return {"o": o, "kv": final.kv, "z": final.z}


def _delta(x: Tensors, backend: str, **settings: Any) -> Tensors:
    gates, state = (x["beta"].sigmoid(), -softplus(x["decay"])), DeltaRuleState(x["kv0"])
    o, final = delta_rule(x["q"], x["k"], x["v"], *gates, state=state, backend=backend, **settings)
    return {"o": o, "kv": final.kv}


def _delta_steps(x: Tensors, backend: str) -> Tensors:
    if backend == "reference":
        return _delta(x, backend)
    held, steps = DeltaRuleState(x["kv0"].clone()), []
    for piece in (slice(0, 1), slice(1, 3)):
        q, k, v, beta, decay = (x[name][:, :, piece] for name in ("q", "k", "v", "beta", "decay"))
        steps.append(delta_step_(q, k, v, beta.sigmoid(), -softplus(decay), held, backend=backend))
    return {"o": torch.cat(steps, 2), "kv": held.kv}


def _feature_parts(draw: _Draw, D: int) -> Iterator[Part]:
    feature_map = get_feature_map("norm_preserving", D, 4, 2).to(draw.device).requires_grad_(False)
    for side, heads in (("q", 4), ("k", 2)):

        def compute(x: Tensors, backend: str, side: str = side) -> Tensors:
            return {"features": features_of(feature_map, x["x"], side, backend=backend)}  # type: ignore[arg-type]

        yield Part(f"norm-preserving features of {side}", {"x": draw.tokens(heads, D)}, compute)


def _window_part(draw: _Draw, D: int) -> Part:
    x = draw.qkv(D) | {"f": draw.tokens(4, D)}
    x |= {"sink_k": draw.tensor(2, 2, SINKS, D), "sink_v": draw.tensor(2, 2, SINKS, D)}
    x |= {"bias": draw.tensor(4, dtype=torch.float32), "weight": 0.1 * draw.tensor(4, D, dtype=torch.float32)}
    index = torch.arange(draw.count, device=draw.device)
    # The first tokens are padding of the second row.
    real = index >= torch.tensor([[0], [draw.count // 5]], device=draw.device)
    number = (real.cumsum(1) - WINDOW).clamp(min=0)
    seen = (index >= WINDOW)[None, :, None].expand(2, -1, SINKS).contiguous()

    def compute(x: Tensors, backend: str) -> Tensors:
        own_key = OwnKey(x["f"], x["bias"], x["weight"], real, number)
        sinks = x["sink_k"], x["sink_v"], seen
        settings = {"window": WINDOW, "scaling": D**-0.5, "key_mask": real, "sinks": sinks, "own_key": own_key}
        o = window_attention(x["q"], x["k"], x["v"], **settings, backend=backend)  # type: ignore[arg-type]
        # The output of a padded query is undefined.
        return {"o": o * real[:, None, :, None]}

    return Part(f"a window of {WINDOW} with {SINKS} sinks and a key of each query's own", x, compute)


def _kept_part(draw: _Draw, D: int) -> Part:
    keys = WINDOW + draw.count
    x = draw.qkv(D) | {name: draw.tokens(2, D, keys) for name in ("kept_k", "kept_v")}
    # At every query one key enters and the oldest one goes.
    number = torch.arange(keys, device=draw.device)
    slot, ends = (number[: draw.count] % WINDOW).expand(2, 2, -1), number.expand(2, 2, -1)
    begins = (number - WINDOW).expand(2, -1)

    def compute(x: Tensors, backend: str) -> Tensors:
        kept = KeptKeys(x["kept_k"], x["kept_v"], slot, begins, ends)
        settings = {"window": WINDOW, "scaling": D**-0.5, "kept": kept}
        return {"o": window_attention(x["q"], x["k"], x["v"], **settings, backend=backend)}  # type: ignore[arg-type]

    return Part(f"a window of {WINDOW} with as many keys kept beyond it", x, compute)


def _step_part(draw: _Draw, F: int, V: int) -> Part:
    x = _features(draw.qkv(F, V, count=3)) | draw.state(F, V)

    def compute(x: Tensors, backend: str) -> Tensors:
        if backend == "reference":
            return _linear(x, backend, feature_map=None)
        held = decode_state(2, 2, F, V, device=x["q"].device)
        held.kv.copy_(x["kv0"])
        held.z.copy_(x["z0"][:, :, None])
        steps = []
        for piece in (slice(0, 1), slice(1, 3)):
            q, k, v = (x[name][:, :, piece] for name in "qkv")
            steps.append(decode_step_(q, k, v, held, phi="identity", backend=backend))
        return {"o": torch.cat(steps, 2), "kv": held.kv, "z": held.z[:, :, 0]}

    return Part(f"steps of generation, {F} features", x, compute, backward=False)


def _layer_part(draw: _Draw, D: int, kept: int = 0) -> Part:
    x, count = draw.qkv(D), draw.count
    angles = draw.tensor(1, count, D // 2, dtype=torch.float32)
    x |= {"turns": torch.cat([angles.cos(), angles.sin()], -1)}

    def compute(x: Tensors, backend: str) -> Tensors:
        settings = {"feature_map": "norm_preserving", "rotary": "undo", "window": WINDOW, "sinks": SINKS}
        config = LinearAttentionConfig(**settings, kept=kept, backend=backend)  # type: ignore[arg-type]
        layer = LinearAttention(config, LayerSizes(D, 4, 2, D**-0.5, D), "layer", rotated=True)
        layer = layer.to(x["q"].device, torch.promote_types(x["q"].dtype, torch.float32))
        rotation, state, found = Rotation(x["turns"].to(x["q"].dtype), Layout("half", "pair")), State(), []
        starts = [0, count - 3, count - 2, count - 1, count]
        for a, b in pairwise(starts):
            call = Call(state=state, rotation=rotation.cut(a, b))
            found.append(layer(*(x[name][:, :, a:b] for name in "qkv"), call))
        return {"o": torch.cat(found, 2), "kv": state.read()["kv"], "z": state.read()["z"]}

    recipe = f"that keeps {kept} keys" if kept else "of the recommended recipe"
    return Part(f"a layer {recipe}, a prompt and then tokens", x, compute, backward=False)
