"""Text read without gradients by one kernel, or by one loop, gives what the layer's general path gives."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State, fused
from hf_linear_attn.ops.rotation import Layout, Rotation
from tests.ops.oracle import DEVICE, assert_near
from tests.spread import spread

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""By norm, as for the window's kernels."""


TURNED = Layout("half", "pair")


@dataclass(frozen=True)
class Case:
    """A layer, and text for it."""

    heads: tuple[int, int] = (2, 1)
    head_dim: int = 16
    value_dim: int = 16
    lengths: tuple[int, ...] = (36,)
    window: int = 7
    sinks: int = 2
    feature_map: str = "norm_preserving"
    mix: str = "key"
    rule: str = "additive"
    layout: Layout | None = TURNED
    turned: int = 16
    masked: bool = False
    packed: bool = False
    rows: int = 1
    rows_turned: int = 1
    dtype: torch.dtype = torch.float32

    def layer(self, backend: str) -> LinearAttention:
        torch.manual_seed(0)
        config = LinearAttentionConfig(
            feature_map=self.feature_map, update_rule=self.rule, rotary="undo", window=self.window, sinks=self.sinks,
            mix=self.mix, backend=backend,
        )  # fmt: skip
        sizes = Sizes(self.head_dim, *self.heads, self.head_dim**-0.5, self.value_dim)
        layer = LinearAttention(config, sizes, "layer", rotated=self.layout is not None)
        with torch.no_grad():
            for x in layer.parameters():
                x.add_(0.2 * torch.randn_like(x))
            if self.rule == "decay":
                # At its start little would fade in texts as short as these.
                layer.rule_decay_bias.add_(5)
        return layer.to(DEVICE)

    def call(self, tokens: int, seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], Call]:
        g = torch.Generator().manual_seed(seed)
        batch = 1 if self.packed else self.rows

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=g).to(DEVICE, self.dtype)

        dims = (self.heads[0], self.head_dim), (self.heads[1], self.head_dim), (self.heads[1], self.value_dim)
        q, k, v = (draw(batch, tokens, *dim).transpose(1, 2) for dim in dims)
        call = Call()
        if self.masked:
            mask = torch.ones(batch, tokens, dtype=torch.bool)
            mask[0, : tokens // 3] = False
            call = call._replace(key_mask=mask.to(DEVICE))
        if self.packed:
            bounds = torch.tensor([0, tokens // 2, tokens // 2 + 5, tokens], device=DEVICE)
            call = call._replace(cu_seqlens=bounds)
        if self.layout is not None:
            call = call._replace(rotation=Rotation(draw(self.rows_turned, tokens, self.turned), self.layout))
        return (q, k, v), call


CASES = {
    "plain": Case(layout=None, lengths=(24,)),
    "turned, by halves": Case(head_dim=32, turned=32),
    "neighbours, in part, at the end": Case(layout=Layout("next", "pair", at_end=True), turned=10, lengths=(20,)),
    "more heads and rows": Case(heads=(4, 2), lengths=(18,), sinks=0, rows=2),
    "rows turned apart": Case(heads=(2, 2), lengths=(20, 18), rows=2, rows_turned=2),
    "twelve heads that share one": Case(heads=(12, 1), lengths=(20,)),
    "in pieces": Case(lengths=(20, 1, 18), masked=True, rows=2),
    "pieces within the window": Case(lengths=(3, 2, 18), masked=True),
    "packed": Case(packed=True, lengths=(40,)),
    "hedgehog": Case(feature_map="hedgehog", lengths=(20,)),
    "sizes that no tile fits": Case(head_dim=20, value_dim=12, turned=20, lengths=(20,)),
    "a window over blocks": Case(window=70, lengths=(90,), heads=(1, 1)),
    "bf16": Case(dtype=torch.bfloat16, lengths=(18, 18), head_dim=32, turned=32),
    "fp16": Case(dtype=torch.float16, lengths=(20,)),
}
LOOPS = {
    "decay, a window over blocks": Case(rule="decay", window=70, lengths=(90, 20), heads=(1, 1)),
    "elu": Case(feature_map="elu", lengths=(20, 1, 18), masked=True, rows=2, heads=(4, 2)),
    "elu, rotation kept, gate": Case(feature_map="elu", mix="gate", layout=None, lengths=(40,)),
    "exp and decay, packed": Case(feature_map="exp", rule="decay", packed=True, lengths=(40,)),
    "squared relu, sizes that no vector fits": Case(
        feature_map="squared_relu", head_dim=20, value_dim=12, turned=20, lengths=(20,)
    ),
    "sigmoid, bf16": Case(feature_map="sigmoid", dtype=torch.bfloat16, lengths=(20, 18)),
    "decay, bf16": Case(rule="decay", dtype=torch.bfloat16, lengths=(18, 18), head_dim=32, turned=32),
}
"""What loops read besides, and kernels do not, in sizes and dtypes that tests/ops/test_hybrid.py has not."""


def read(case: Case, backend: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Read the case's pieces one after the other; return what each gives, and the state where it is kept."""
    layer, state, outputs = case.layer(backend), None if case.packed else State(), []
    with torch.no_grad():
        for n, tokens in enumerate(case.lengths):
            text, call = case.call(tokens, n)
            o = layer(*text, call._replace(state=state, in_place=False))
            if call.key_mask is not None:
                o = o * call.key_mask[:, None, :, None]
            outputs.append(o)
    return outputs, {} if state is None else state.read()


def skip_fp16(case: Case, backend: str) -> None:
    if backend == "numba" and case.dtype == torch.float16:
        pytest.skip("loops take no fp16")


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_masks_are_read_at_every_call(backend: str) -> None:
    """Also where their memory is written by what PyTorch does not see, as a graph's replay or NumPy."""
    case = Case(masked=True)
    layer, (given, call) = case.layer(backend), case.call(36, 0)
    mask = call.key_mask
    assert mask is not None
    with torch.no_grad():
        before = layer(*given, call)
        mask.data[0] = True
        mask.data[0, :20] = False
        found, expected = layer(*given, call), layer(*given, call._replace(key_mask=mask.clone()))
    torch.testing.assert_close(found[:, :, 20:], expected[:, :, 20:])
    assert (found - before)[:, :, 20:].abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "backend"), [*product(CASES | LOOPS, ["numba"]), *spread(product(CASES, ["triton"]), 2)]
)
def test_gives_what_the_general_path_gives(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = (CASES | LOOPS)[name], 0
    skip_fp16(case, backend)
    one = fused.hybrid_prefill

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return one(*arguments)

    monkeypatch.setattr(fused, "hybrid_prefill", counted)
    found, state = read(case, backend)
    assert calls
    wanted, expected = read(case, "torch")
    for x, y in zip((*found, *state.values()), (*wanted, *(expected[name] for name in state)), strict=True):
        assert_near(x, y, TOLERANCE[case.dtype])


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_a_cache_of_bf16_goes_on_in_fp32(backend: str) -> None:
    """As after a prompt under autocast; sinks are still what they were read as."""
    case, found = Case(head_dim=32, turned=32), []
    for reader in (backend, "torch"):
        layer, state = case.layer(reader), State()
        with torch.no_grad():
            for n, dtype in enumerate((torch.bfloat16, torch.float32)):
                text, call = case.call(18, n)
                o = layer(*(x.to(dtype) for x in text), call._replace(state=state, in_place=False))
        found.append(o)
    assert_near(*found, TOLERANCE[torch.bfloat16])


@pytest.mark.filterwarnings("ignore:<class .torch.autograd.function.Function.*:DeprecationWarning")
def test_a_compiled_layer_reads_it_too() -> None:
    case = Case(lengths=(20,))
    layer, (text, call) = case.layer("triton"), case.call(20, 0)
    with torch.no_grad():
        wanted = case.layer("torch")(*text, call)
        found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*text, call)
    torch.compiler.reset()
    assert_near(found, wanted, TOLERANCE[case.dtype])


def test_who_asks_for_gradients_gets_them() -> None:
    case = Case(lengths=(20,))
    layer, (text, call) = case.layer("triton"), case.call(20, 0)
    layer(*text, call).sum().backward()
    assert all(x.grad is not None for x in layer.parameters())


def test_loops_lose_nothing_behind_keys_that_leave_nothing() -> None:
    """A log decay of -10000 for one key in three, and of a twentieth for the others."""
    found = []
    for backend in ("torch", "numba"):
        case = Case(rule="decay", layout=None, lengths=(60,))
        layer, ((q, k, v), call) = case.layer(backend), case.call(60, 0)
        k[..., 0] = (torch.arange(60) % 3 == 0).float()
        with torch.no_grad():
            layer.rule_decay_bias.fill_(-3)
            layer.rule_decay_value.zero_()
            layer.rule_decay_key.zero_()[:, 0] = 1e4
            found.append(layer(q, k, v, call))
    assert_near(*found[::-1], 2e-6)


@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_of_another_size_than_a_decays_are_refused(value_dim: int) -> None:
    case = Case(rule="decay", value_dim=value_dim, lengths=(20,))
    layer, (text, call) = Case(rule="decay").layer("numba"), case.call(20, 0)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="update_rule"):
        layer(*text, call)
