"""Layers drawn from the registries, texts for them, and what the definition gives."""

import zlib
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from hf_linear_attn import LinearAttentionConfig, available_feature_maps
from hf_linear_attn.feature_maps.base import feature_map_class
from hf_linear_attn.layers import Call, LinearAttention, Sizes
from hf_linear_attn.layers.mixes import MIXES
from hf_linear_attn.layers.rules import RULES
from hf_linear_attn.ops.hybrid import Geometry, HybridParams, HybridState, Tokens, hybrid_reference
from hf_linear_attn.ops.hybrid.formulas import GATES
from hf_linear_attn.ops.rotation import Layout, Rotation
from tests.ops.oracle import DEVICE

HALF, NEXT_AT_END = Layout("half", "pair"), Layout("next", "pair", at_end=True)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer, its window, and how its model turns queries and keys."""

    H: int = 4
    HKV: int = 2
    D: int = 8
    V: int = 8
    window: int = 5
    sinks: int = 2
    kept: int = 0
    retention: str = "redundancy"
    turned: int = 0
    layout: Layout = HALF
    factor: float = 1.0


SHAPES = (
    Shape(turned=8),
    Shape(H=3, HKV=1, D=6, V=5, window=4, sinks=0, turned=4, layout=NEXT_AT_END, factor=1.3),
    Shape(H=2, D=8, V=7, window=1, sinks=1),
    Shape(D=6, V=5, window=3, sinks=9, turned=6),
    Shape(HKV=1, window=40, sinks=3),
    Shape(kept=4, window=3, sinks=1, turned=8),
    Shape(H=2, D=6, V=5, kept=2, window=5, sinks=0),
    Shape(kept=3, window=4, sinks=1, turned=6, retention="learned"),
)
"""Groups of all kinds, a window of the query alone, sinks beyond the window, a window longer than the text, kept keys,
of which none are left or all are at the text's end."""

LONG = Shape(H=16, HKV=1, D=128, turned=64, window=9)
"""Heads so large that a text of 150 tokens is walked span by span."""

WIDE = Shape(H=2, HKV=1, D=160, V=132, turned=160, window=5, sinks=1)
"""Heads whose features no kernel holds whole."""

HALVED = Shape(H=2, HKV=1, D=32, V=32, turned=32, window=5, sinks=2)
"""Heads that kernels take as two halves, which add gradients of queries and keys to those of the window."""

GROUPED = replace(HALVED, H=4, HKV=2)
"""The same with several key heads."""
HALVED_WIDE = replace(HALVED, D=128, V=72, turned=128)
"""The same of which no program holds the gradients of both keys and values."""

OF_80 = Shape(H=2, HKV=1, D=80, V=80, turned=80, window=5, sinks=2)
OF_96 = Shape(H=2, HKV=1, D=96, V=80, turned=24, layout=NEXT_AT_END, factor=1.3, window=4, sinks=0)
"""Heads that one kernel takes as 64 columns and a rest."""

NAMED = {WIDE: "wide", HALVED: "halved", LONG: "long", OF_80: "80", OF_96: "96"}
NAMED |= {GROUPED: "grouped", HALVED_WIDE: "halved and wide"}

LIGHT = ("norm_preserving", "elu", "hedgehog")
"""Maps with not too many features of such heads."""

OPTIONS = {"cosformer": {"max_length": 40}}
"""Of maps that would hardly see a position in texts as short as these."""


@dataclass(frozen=True)
class Spec:
    """A layer, and the text that it reads."""

    rule: str = "additive"
    mix: str | None = "key"
    feature_map: str = "norm_preserving"
    shape: Shape = Shape()

    def __str__(self) -> str:
        """Name it in a test's name."""
        shape = SHAPES.index(self.shape) if self.shape in SHAPES else NAMED.get(self.shape, "usual")
        return f"{self.rule}-{self.mix or 'no window'}-{self.feature_map}-{shape}"

    def layer(self, backend: str, dtype: torch.dtype) -> LinearAttention:
        """Return the layer, the same one for every backend, with weights that are not where they start."""
        s = self.shape
        window = {} if self.mix is None else {"window": s.window, "sinks": s.sinks, "kept": s.kept, "mix": self.mix}
        # As the preset has.
        window |= {"retention": s.retention, "retention_units": 16} if self.mix else {}
        config = LinearAttentionConfig(
            feature_map=self.feature_map, feature_map_options=OPTIONS.get(self.feature_map, {}), backend=backend,
            update_rule=self.rule, rotary="undo" if s.turned else "keep", **window,
        )  # fmt: skip
        sizes = Sizes(s.D, s.H, s.HKV, s.D**-0.5, s.V)
        layer = LinearAttention(config, sizes, "layer", rotated=s.turned > 0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, x in layer.named_parameters():
                # At its start little would fade in texts as short as these.
                x += 0.3 * torch.randn(x.shape, generator=generator, device="cpu").to(x) + 5 * (
                    name == "rule_decay_bias"
                )
        return (layer.double() if dtype == torch.float64 else layer).to(DEVICE)

    def text(self, kind: str, dtype: torch.dtype) -> Tokens:
        """Draw a text, or several: ``"rows"`` are of several lengths, ``"padded, longer"`` spans segments of tests."""
        s, sizes = self.shape, {"packed": (1, 40), "rows": (4, 17), "long": (1, 150), "padded, longer": (2, 45)}
        rows, tokens = sizes.get(kind, (2, 17))
        g = torch.Generator().manual_seed(zlib.crc32(kind.encode()))

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=g, device="cpu")

        q, k, v = (draw(rows, tokens, *dims).transpose(1, 2) for dims in ((s.H, s.D), (s.HKV, s.D), (s.HKV, s.V)))
        if not feature_map_class(self.feature_map).non_negative:
            # A normaliser that vanishes measures luck.
            q, k = 0.3 * q + 0.8, 0.3 * k + 0.8
        rotation = None
        if s.turned:
            angles = 6 * torch.rand(rows, tokens, s.turned // 2, generator=g, device="cpu")
            turns = s.factor * torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE, dtype)
            rotation = Rotation(turns, s.layout)
        q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
        if rotation is not None:
            q, k = rotation.do(q), rotation.do(k)
        mask = torch.ones(rows, tokens, dtype=torch.bool)
        if kind.startswith("padded"):
            mask[0, :4] = mask[0, 9:11] = mask[1, 8] = mask[1, -3:] = False
        if kind == "packed":
            mask[0, [0, 12, 20]] = False
        if kind == "rows":
            mask = torch.arange(tokens) < torch.tensor(LENGTHS)[:, None]
        bounds = torch.tensor(BOUNDS) if kind == "packed" else None
        mask = None if mask.all() else mask.to(DEVICE)
        return Tokens(q=q, k=k, v=v, key_mask=mask, cu_seqlens=bounds, rotation=rotation)


LENGTHS = (17, 9, 13, 2)
"""Of the texts side by side."""
BOUNDS = (0, 9, 9, 26, 40)
"""Of those end to end."""


def specs() -> tuple[list[Spec], list[Spec]]:
    """Return layers for `make test`, of which each rule, mix, map and shape is part of some, and all others."""
    maps, first, others, read = available_feature_maps(), [], [], []
    for mix in MIXES.values():
        if mix.has_far:
            read += [(rule.name, mix.name) for rule in RULES.values() if mix.needs <= rule.provides]
        else:
            first += [Spec(mix=mix.name, shape=shape) for shape in SHAPES[::2]]
            others += [Spec(mix=mix.name, shape=shape) for shape in SHAPES[1::2]]
    read += [(rule, None) for rule in RULES]
    for n in range(len(read) * len(maps)):
        rule, mix = read[n % len(read)]
        # Those that come later in a round meet other maps in each.
        spec = Spec(rule, mix, maps[(n + n // (len(read) * len(maps) // 2)) % len(maps)], SHAPES[n % len(SHAPES)])
        (first if n < max(len(read), len(maps)) else others).append(spec)
    # The map that is recommended has kernels of its own; of two shapes, keys leave the window of one at least.
    first += [Spec(rule, mix, shape=SHAPES[(n + 2) % len(SHAPES)]) for n, (rule, mix) in enumerate(read)]
    return first, others


def params_of(layer: LinearAttention) -> HybridParams:
    """Return what a layer computes, for the definition."""
    settings, learned = layer.settings, layer.weights("rule")
    gates = {name: x for name, x in learned.items() if name.split("_")[0] in GATES}
    return HybridParams(
        feature_map=layer.feature_map,
        geometry=Geometry(window=settings.window, sinks=settings.sinks, kept=settings.kept),
        rule=settings.update_rule,
        gate_weights=gates,
        rule_weights={name: x for name, x in learned.items() if name not in gates},
        mix=settings.mix,
        retention=settings.retention,
        retention_weights=layer.weights("retention"),
        mix_weights=layer.weights("mix"),
        scaling=layer.sizes.scaling,
        eps=settings.eps,
    )


def defined(layer: LinearAttention, tokens: Tokens) -> tuple[Tensor, HybridState]:
    """Return what the definition gives for a text, and what is remembered of it."""
    return hybrid_reference(tokens if layer.undoes else replace(tokens, rotation=None), params_of(layer))


@cache
def expected(spec: Spec, kind: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same for a drawn one: outputs, and the sums of each row and key head by the names of a layer's."""
    layer, tokens = spec.layer("reference", dtype), spec.text(kind, dtype)
    with torch.no_grad():
        o, state = defined(layer, tokens)
        if kind == "rows":
            # What comes behind a text's end is no part of it, not even padding.
            each = [defined(layer, row(tokens, r).cut(0, length))[1] for r, length in enumerate(LENGTHS)]
            state = HybridState(heads=[x.heads[0] for x in each], seen=[x.seen[0] for x in each])
    heads = [head for of_text in state.heads for head in of_text]
    rows = len(state.heads), len(heads) // len(state.heads)
    sums = {name: torch.stack([head.sums[name] for head in heads]).unflatten(0, rows) for name in heads[0].sums}
    return o, sums | {"far_keys": torch.stack([head.key_sum for head in heads]).unflatten(0, rows)}


def row(tokens: Tokens, n: int) -> Tokens:
    """Return one row of a batch."""
    q, k, v, mask = (None if x is None else x[n : n + 1] for x in (tokens.q, tokens.k, tokens.v, tokens.key_mask))
    return replace(tokens, q=q, k=k, v=v, key_mask=mask, rotation=tokens.rotation and tokens.rotation.row(n))


def hidden(tokens: Tokens) -> Tokens:
    """Return tokens of which keys and values that are masked are NaN: what they hold must not matter."""
    if tokens.key_mask is None:
        return tokens
    k, v = (x.masked_fill(~tokens.key_mask[:, None, :, None], torch.nan) for x in (tokens.k, tokens.v))
    return replace(tokens, k=k, v=v)


def shown(o: Tensor, tokens: Tokens) -> Tensor:
    """Return outputs of real tokens, and 0 of padding."""
    return o if tokens.key_mask is None else torch.where(tokens.key_mask[:, None, :, None], o, 0)


def call_of(tokens: Tokens, **others: object) -> Call:
    """Return the call that reads tokens."""
    return Call(key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens, rotation=tokens.rotation, **others)


def pieces(tokens: Tokens, lengths: tuple[int, ...]) -> list[Tokens]:
    """Cut tokens into pieces; the last one is what is left."""
    ends = [0]
    while ends[-1] < tokens.q.shape[2]:
        ends.append(min(ends[-1] + lengths[min(len(ends), len(lengths)) - 1], tokens.q.shape[2]))
    return [tokens.cut(*each) for each in pairwise(ends)]
