"""A step of a layer with a window by its kernel, against the same tokens read in one piece by PyTorch."""

from itertools import product
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, BackendError
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State, fused, pool
from hf_linear_attn.layers.pool import Pool, Rows, pool_slots, read_, step_rows_
from hf_linear_attn.ops.hybrid import HybridStep, hybrid_step_
from hf_linear_attn.ops.hybrid.numba import step as looped
from hf_linear_attn.ops.hybrid.triton import op
from hf_linear_attn.ops.rotation import Layout, Rotation
from tests.spread import spread

from .oracle import DEVICE, assert_near

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""By norm: the general path rounds features and the linear branch's output to the tokens' dtype."""


class Case(NamedTuple):
    """A layer, and a text that it reads: a first piece in whatever way, then token by token."""

    feature_map: str = "elu"
    mix: str = "key"
    B: int = 2
    H: int = 4
    HKV: int = 2
    D: int = 16
    V: int = 16
    window: int = 4
    sinks: int = 2
    first: int = 1
    T: int = 10
    dtype: torch.dtype = torch.float32
    padded: bool = False
    static: bool = False
    copies: int | None = None
    rule: str = "additive"
    kept: int = 0
    retention: str = "redundancy"
    turned: int = 0
    layout: Layout = Layout("half", "pair")
    options: dict[str, object] = {}  # noqa: RUF012  # nobody changes it

    def layer(self, backend: str) -> LinearAttention:
        """Return the layer, with weights that are not where they start, the same ones for both backends."""
        config = LinearAttentionConfig(
            feature_map=self.feature_map,
            feature_map_options=self.options,
            mix=self.mix,
            update_rule=self.rule,
            window=self.window,
            sinks=self.sinks,
            kept=self.kept,
            retention=self.retention,
            backend="auto" if self.kept else backend,
            rotary="undo" if self.turned else "keep",
        )
        # By name kernels are refused where keys are kept, since none reads texts; on a GPU "auto" takes them for steps.
        object.__setattr__(config, "backend", backend)
        sizes = Sizes(self.D, self.H, self.HKV, self.D**-0.5, self.V)
        layer = LinearAttention(config, sizes, "layer", rotated=self.turned > 0).to(DEVICE)
        g = torch.Generator(DEVICE).manual_seed(1)
        for weight in layer.parameters():
            nn.init.normal_(weight, mean=weight.mean().item(), std=0.3, generator=g)
        return layer

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q, k and v."""
        g = torch.Generator(DEVICE).manual_seed(0)
        sizes = ((self.H, self.D), (self.HKV, self.D), (self.HKV, self.V))
        q, k, v = (
            torch.randn(self.B, self.T, heads, dim, generator=g).to(self.dtype).transpose(1, 2) for heads, dim in sizes
        )
        return (q.abs(), k.abs(), v) if self.feature_map == "identity" else (q, k, v)

    def rotation(self) -> Rotation | None:
        """Draw angles, with a factor on their cosines and sines."""
        if not self.turned:
            return None
        g = torch.Generator(DEVICE).manual_seed(2)
        rows = self.B if self.padded else 1
        angles = 6 * torch.rand(rows, self.T, self.turned // 2, generator=g)
        return Rotation(1.2 * torch.cat([angles.cos(), angles.sin()], -1).to(self.dtype), self.layout)

    def mask(self) -> Tensor | None:
        """Pad the first row on the left beyond the first piece, and finish the last one early."""
        if not self.padded:
            return None
        mask = torch.ones(self.B, self.T, dtype=torch.bool)
        mask[0, : self.first + 2] = False
        mask[-1, self.T - 2 :] = False
        return mask


CASES = [
    Case(),
    Case("norm_preserving", padded=True, first=3, copies=2, V=40, D=20, T=12),
    Case("hedgehog", "gate", H=3, HKV=1, sinks=0, first=7),
    Case("relu", "window", H=2, padded=True, static=True, V=24),
    Case("norm_preserving", B=1, H=4, HKV=1, window=19, sinks=4, first=18, T=26, dtype=torch.bfloat16, V=33),
    Case("hedgehog", "key", static=True, D=24, sinks=3, padded=True, dtype=torch.float16),
    Case("identity", "gate", H=2, HKV=2, D=8, V=33, copies=3, window=1, sinks=1, T=7),
    Case("norm_preserving", turned=16, padded=True),
    Case("elu", turned=8, layout=Layout("next", "pair"), D=12, static=True, dtype=torch.bfloat16),
    Case("norm_preserving", rule="decay", turned=16, padded=True, V=24, copies=2, T=14),
    Case("elu", "gate", rule="decay", H=3, HKV=1, V=20, static=True, padded=True),
    Case("hedgehog", rule="decay", B=1, turned=8, D=12, dtype=torch.bfloat16),
    Case("hedgehog", "gate", turned=6, layout=Layout("next", "pair", at_end=True), D=20, H=3, HKV=1, copies=2, V=24),
    Case("exp", "key", turned=4, layout=Layout("half", "pair", at_end=True), D=9, B=3, H=3, HKV=3, padded=True),
    Case("exp", "key", B=3, H=3, HKV=3, D=5, V=7, window=2, sinks=4, T=11, padded=True),
    Case("hedgehog", "key", options={"num_features": 12, "separate": False}, D=16, sinks=0, window=2, T=6),
    Case(
        "hedgehog",
        "key",
        options={"per_head": False},
        B=1,
        H=2,
        HKV=1,
        window=30,
        dtype=torch.bfloat16,
        static=True,
        T=5,
    ),
    Case("norm_preserving", kept=3, turned=16, padded=True, T=16),
    Case("elu", "window", kept=5, window=2, static=True, V=24, dtype=torch.bfloat16, T=14),
    Case("hedgehog", "gate", rule="decay", H=3, HKV=1, kept=1, sinks=0, V=20, padded=True, T=12),
    Case("elu", "window", kept=3, retention="learned", turned=8, padded=True, T=14),
    Case("norm_preserving", kept=2, window=20, sinks=1, retention="learned", turned=16, first=18, T=30, V=12),
    Case("hedgehog", "gate", B=1, kept=4, window=3, retention="learned", static=True, T=14),
    # Of a window of 1 the last age that scores are of is 32.
    Case("elu", "window", H=2, HKV=1, D=8, V=8, window=1, kept=3, retention="learned", T=80),
    # A rule's kernel reads so wide keys in two pieces.
    Case("elu", "window", B=1, H=2, HKV=1, D=224, V=200, kept=3, retention="learned", T=20, dtype=torch.bfloat16),
]

MANY = [
    Case("norm_preserving", B=17, H=1, HKV=1, D=12, V=24, copies=2, window=1, sinks=1, T=4, turned=8, padded=True),
    Case("hedgehog", B=8, H=3, HKV=1, D=8, V=8, window=2, sinks=1, T=6, static=True, rule="decay", dtype=torch.float16),
    Case("norm_preserving", B=8, H=2, HKV=1, D=8, V=8, window=1, sinks=0, kept=1, T=4, turned=6),
    Case("norm_preserving", "gate", B=9, H=2, HKV=1, D=8, V=8, window=2, T=6, turned=4, dtype=torch.bfloat16),
    Case("elu", "window", B=17, H=1, HKV=1, D=8, V=8, window=2, sinks=1, kept=1, retention="learned", T=7),
    Case("hedgehog", "gate", options={"per_head": False}, B=8, H=2, HKV=2, D=8, V=8, window=2, sinks=0, T=5, kept=2),
]
"""Steps of so many rows that features are computed before them."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the steps that the kernel or the loop serves."""
    served: list[object] = []

    def serve(whole: HybridStep, chosen: Literal["triton", "numba"]) -> Tensor:
        if chosen == "triton":
            served.append(whole)
        return hybrid_step_(whole, chosen)

    for module in (fused, pool):
        monkeypatch.setattr(module, "hybrid_step_", serve)
    loop = looped.in_parts
    monkeypatch.setattr(looped, "in_parts", lambda *arguments: served.append(arguments) or loop(*arguments))
    return served


def read(layer: LinearAttention, case: Case, state: State, start: int, end: int) -> Tensor:
    """Read some of the tokens; of what is masked, keys and values are NaN."""
    q, k, v = (x[:, :, start:end] for x in case.tokens())
    mask = case.mask()
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, start:end, None], float("nan")) for x in (k, v))
    with torch.no_grad():
        return layer(q, k, v, call_of(case, state, start, end))


def call_of(case: Case, state: State, start: int, end: int) -> Call:
    """Return the call that reads some of the tokens."""
    mask, rotation = case.mask(), case.rotation()
    return Call(
        key_mask=None if mask is None else mask[:, start:end],
        state=state,
        rotation=None if rotation is None else rotation.cut(start, end),
    )


def begin(case: Case, monkeypatch: pytest.MonkeyPatch) -> State:
    """Read the first piece in PyTorch, into a state of so many copies."""
    monkeypatch.setattr("hf_linear_attn.layers.attention.copies_of", lambda *sizes: case.copies)
    state = State(static=case.static)
    read(case.layer("torch"), case, state, 0, case.first)
    return state


def poison(case: Case, state: State) -> None:
    """Fill the slots that hold no token with NaN."""
    for name in ("near_k", "near_v"):
        unused = ~state.tensors["near_mask"][:, None, :, None].clone()
        unused[:, :, : case.sinks] &= (torch.arange(case.sinks) >= state.tensors["seen"][:, None])[:, None, :, None]
        state.tensors[name].masked_fill_(unused, float("nan"))


@pytest.mark.parametrize(
    ("case", "backend"),
    [*product(CASES, ["numba"]), *spread(product(CASES, ["triton"]), 2), *spread(product(MANY, ["triton"]), 2)],
    ids=str,
)
def test_steps_are_the_general_path(
    case: Case, backend: str, launches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "numba" and case.dtype == torch.float16:
        pytest.skip("loops take no fp16")
    layer, state, whole = case.layer(backend), begin(case, monkeypatch), State()
    expected = read(case.layer("torch"), case, whole, 0, case.T)
    poison(case, state)
    addresses = {name: x.data_ptr() for name, x in state.tensors.items()}
    found = torch.cat([read(layer, case, state, t, t + 1) for t in range(case.first, case.T)], 2)
    assert len(launches) == case.T - case.first
    assert found.dtype == case.dtype
    assert found.isfinite().all()
    mask = case.mask()
    real = 1 if mask is None else mask[:, None, case.first :, None]
    assert_near(found * real, expected[:, :, case.first :] * real, TOLERANCE[case.dtype], "o", least=1e-9)
    assert {name: x.data_ptr() for name, x in state.tensors.items()} == addresses
    assert int(state.length) == whole.length == case.T
    held, exact = state.read(), whole.read()
    for name in exact.keys() & {"kv", "z", "far_keys"}:
        assert_near(held[name], exact[name], TOLERANCE[case.dtype], name, least=1e-9)
        copies = state.tensors[name]
        if case.copies is not None and name != "kv":
            assert copies.shape[2] == case.copies
            assert all(torch.equal(x, held[name]) for x in copies.unbind(2))
    assert torch.equal(held["seen"], exact["seen"])
    if case.kept:
        assert torch.equal(held["kept_at"], exact["kept_at"])
        for name in {"kept_k", "kept_v", "kept_turns"} & exact.keys():
            assert torch.equal(held[name], exact[name])
    # The slot left over holds a token that nobody sees.
    seen = [*range(case.sinks), *(case.sinks + (case.T - 1 - n) % (case.window + 1) for n in range(case.window))]
    assert torch.equal(held["near_mask"][:, seen], exact["near_mask"][:, seen])
    counts = exact["near_mask"][:, None, seen, None]
    for name in ("near_k", "near_v"):
        assert torch.equal(
            held[name][:, :, seen].masked_fill(~counts, 0), exact[name][:, :, seen].masked_fill(~counts, 0)
        )


@pytest.mark.parametrize("backend", ["triton", "numba"])
@pytest.mark.parametrize("mix", ["key", "gate", "window"])
def test_pieces_and_steps_alternate(
    mix: str, backend: str, launches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("elu", mix, padded=True, copies=2, V=24, T=18)
    state, whole = begin(case, monkeypatch), State()
    expected, found = read(case.layer("torch"), case, whole, 0, case.T), []
    for n, (start, end) in enumerate([(1, 2), (2, 3), (3, 7), (7, 8), (8, 9), (9, 14), (14, 15), (15, 16), (16, 18)]):
        found.append(read(case.layer("torch" if n % 3 == 2 else backend), case, state, start, end))
    assert launches
    real = case.mask()[:, None, 1:, None]
    assert_near(torch.cat(found, 2) * real, expected[:, :, 1:] * real, TOLERANCE[case.dtype], "o", least=1e-9)


@pytest.mark.parametrize("feature_map", ["dpfp", "taylor"])
def test_maps_without_a_kernel_take_the_general_path(
    feature_map: str, launches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(feature_map, D=4, T=4)
    state, other = begin(case, monkeypatch), begin(case, monkeypatch)
    found = read(case.layer("triton"), case, state, 1, 2)
    assert not launches
    assert_near(found, read(case.layer("torch"), case, other, 1, 2), TOLERANCE[case.dtype], "o", least=1e-9)


def test_plan_does_not_depend_on_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made, launch = Case(B=1, H=1, HKV=1), [], op.hybrid_launches
    monkeypatch.setattr(op, "hybrid_launches", lambda *arguments: made.append(arguments) or launch(*arguments))
    state = begin(case, monkeypatch)
    read(case.layer("triton"), case, state, 1, 2)
    # Triton has kernels of their own for 1 and for multiples of 16.
    made.clear()
    for t in range(2, case.T):
        read(case.layer("triton"), case, state, t, t + 1)
    assert len(made) == 1


def drawn(case: Case, monkeypatch: pytest.MonkeyPatch, **changes: object) -> HybridStep:
    """Return the step after the first piece as the layer hands it to the op."""
    found: list[HybridStep] = []
    monkeypatch.setattr(fused, "hybrid_step_", lambda whole, _: found.append(whole) or whole.q)
    read(case.layer("triton"), case, begin(case, monkeypatch), case.first, case.first + 1)
    return found[0]._replace(**changes)


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, H=1, HKV=1, T=3),
        Case("norm_preserving", B=1, H=1, HKV=1, static=True, padded=True, T=4),
        Case("elu", "window", B=1, H=1, HKV=1, window=2, kept=2, retention="learned", turned=4, first=5, T=7),
    ],
    ids=str,
)
def test_opcheck(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(case, monkeypatch)
    torch.library.opcheck(
        op.triton_hybrid_,
        tuple(x.detach() if isinstance(x, Tensor) else x for x in op.inputs_of(whole)),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_compiles_into_one_graph(launches: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("norm_preserving", B=1, H=2, HKV=1, static=True, padded=True, T=6)
    layer, state, other = case.layer("triton"), begin(case, monkeypatch), begin(case, monkeypatch)
    monkeypatch.setattr(fused, "hybrid_step_", hybrid_step_)
    compiled = torch.compile(
        lambda *x: layer(*x[:3], Call(key_mask=x[3], state=state)), fullgraph=True, backend="aot_eager"
    )
    for t in range(1, case.T):
        q, k, v = (x[:, :, t : t + 1] for x in case.tokens())
        with torch.no_grad():
            found = compiled(q, k, v, case.mask()[:, t : t + 1])
        assert torch.equal(found, read(layer, case, other, t, t + 1))
    for name, x in other.read().items():
        assert torch.equal(state.read()[name], x)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"q": torch.zeros(2, 4, 2, 16)}, "`q` must have shape (2, 4, 1, 16)"),
        ({"mix": "shared"}, "`mix` must be one that the kernel knows"),
        ({"near_v": torch.zeros(2, 2, 6, 16)}, "`near_v` must have shape (2, 2, 7, 16)"),
        ({"z": torch.zeros(2, 2, 17, 16)}, "`z` must have 1 to V = 16 copies"),
        ({"bias": None}, "`bias` must have shape (4,), got None"),
        (
            {"near_turns": torch.zeros(2, 7, 8), "turns": torch.zeros(1, 1, 8)},
            "`near_turns` must have shape (2, 7, 16)",
        ),
        ({"near_turns": torch.zeros(2, 7, 16), "turns": torch.zeros(1, 1, 7)}, "`turns` must have shape (1, 1, 6)"),
        ({"near_turns": torch.zeros(2, 7, 16)}, "`turns` must have shape (1, 1, 0), got None"),
        ({"sinks": 6}, "`sinks` must leave 2 of 7 slots"),
        ({"kv": torch.zeros(2, 2, 16, 32, device=DEVICE)[..., ::2]}, "`kv` must be contiguous"),
    ],
)
@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_refuses_what_does_not_fit(
    changes: dict[str, object], word: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in changes.items()}
    with pytest.raises(ArgumentError) as error:
        hybrid_step_(drawn(Case(), monkeypatch, **changes), backend)
    assert word in str(error.value)


# Torch's own rules for forward mode are scripted.
@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_refuses_other_dtypes_and_transforms(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(Case(), monkeypatch)
    with pytest.raises(ArgumentTypeError, match=r"`kv` must be torch\.float32"):
        hybrid_step_(whole._replace(kv=whole.kv.double()), backend)
    with pytest.raises(ArgumentTypeError, match=r"`k` must be torch\.bfloat16, as q is"):
        hybrid_step_(whole._replace(q=whole.q.bfloat16()), backend)
    with pytest.raises(BackendError, match="under vmap"):
        torch.vmap(lambda q: hybrid_step_(whole._replace(q=q), backend))(whole.q[None])
    with pytest.raises(BackendError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        hybrid_step_(whole._replace(q=torch.autograd.forward_ad.make_dual(whole.q, whole.q)), backend)


@pytest.mark.parametrize("backend", ["triton", "numba"])
@pytest.mark.parametrize(
    "case",
    [
        Case("norm_preserving", kept=3, turned=16, T=16),
        Case("elu", "window", kept=3, retention="learned", turned=8, T=16),
        Case("norm_preserving", B=8, H=2, HKV=1, D=8, V=8, window=2, sinks=1, turned=6, T=11),
    ],
    ids=str,
)
def test_steps_in_a_pool_keep_keys_as_rows_that_are_read(case: Case, backend: str, launches: list[object]) -> None:
    lengths, layers = torch.tensor([9, 4] * (case.B // 2)), [case.layer(name) for name in ("torch", backend)]
    slots, places = pool_slots(layers[0], case.V), torch.tensor([case.B, *range(case.B - 1)])
    count = case.B + 1
    pools = [Pool(slots, {name: slot.zeros(count, torch.empty(0)) for name, slot in slots.items()}) for _ in layers]
    q, k, v = case.tokens()
    rotation = case.rotation()
    with torch.no_grad():
        for b, length in enumerate(lengths.tolist()):
            first = None if rotation is None else rotation.cut(0, length)
            read_(layers[0], *(x[b : b + 1, :, :length] for x in (q, k, v)), pools[0], int(places[b]), 0, first)
        pools[1].tensors.update({name: x.clone() for name, x in pools[0].tensors.items()})
        for t in range(case.T - 9):
            new = [x[:, :, 9 + t : 10 + t] for x in (q, k, v)]
            turned = None if rotation is None else rotation.cut(9 + t, 10 + t)
            of_rows = None if turned is None else turned.of_others(turned.turns.expand(case.B, -1, -1).contiguous())
            found = [
                step_rows_(layer, *new, held, Rows(places, lengths + t), of_rows)
                for layer, held in zip(layers, pools, strict=True)
            ]
            assert_near(found[1], found[0], TOLERANCE[case.dtype], "o", least=1e-9)
    assert len(launches) == case.T - 9
    # Windows have a slot that holds what nobody sees.
    for name, x in pools[0].tensors.items():
        if not name.startswith("near_"):
            torch.testing.assert_close(pools[1].tensors[name][places], x[places], rtol=2e-5, atol=2e-5)
