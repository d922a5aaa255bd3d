"""Attention over a window in both backends, against its definition in float64, and what the kernels cost."""

import math
import random
import shutil
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_linear_attn.errors import BackendError
from hf_linear_attn.layers.numbers import sinks_in_sight
from hf_linear_attn.ops.triton.plan import Launch, Target
from hf_linear_attn.ops.window import NOWHERE, KeptKeys, OwnKey, window_attention
from hf_linear_attn.ops.window.triton import op, problem
from hf_linear_attn.ops.window.triton.backward import window_backward_launches
from hf_linear_attn.ops.window.triton.forward import window_launches
from hf_linear_attn.ops.window.triton.problem import WindowProblem
from tests.spread import spread

from .oracle import DEVICE, laid_out, poison

BACKENDS = ("torch", "triton")
SCALE = 10 if DEVICE.type == "cuda" else 1
"""On a GPU tiles and blocks are larger, and problems that have several of them must be."""
SCALING = 0.4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""By norm; no row may be off by ten times that."""


@dataclass(frozen=True)
class Case:
    """A problem; everything in it follows from its fields."""

    B: int = 2
    H: int = 2
    HKV: int = 1
    T: int = 40
    past: int = 0
    D: int = 16
    V: int = 16
    window: int = 7
    sinks: int = 0
    own: bool = False
    before: bool = False
    masked: bool = False
    kept: int = 0
    layout: str = "bhtd"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self) -> dict[str, Tensor]:
        g = torch.Generator(DEVICE).manual_seed(self.seed)
        S = self.past + self.T

        def draw(heads: int, tokens: int, dim: int) -> Tensor:
            return laid_out(self.layout, (self.B, heads, tokens, dim), self.dtype, g)

        x = {"q": draw(self.H, self.T, self.D), "k": draw(self.HKV, S, self.D), "v": draw(self.HKV, S, self.V)}
        x["do"] = draw(self.H, self.T, self.V)
        mask = torch.ones(self.B, S, dtype=torch.bool)
        if self.masked:
            mask = torch.rand(self.B, S, generator=g) > 0.3
            mask[0, : S // 3] = False
            x["mask"] = mask
            # What stands where no token is, and what queries there give, matters to nobody.
            for name in ("k", "v"):
                x[name] = x[name] * mask[:, None, :, None]
            x["do"] = x["do"] * mask[:, None, self.past :, None]
        if self.sinks:
            x["sink_k"], x["sink_v"] = draw(self.HKV, self.sinks, self.D), draw(self.HKV, self.sinks, self.V)
            x["seen"] = torch.rand(self.B, self.T, self.sinks, generator=g) > 0.4
        if self.own:
            x["f"] = draw(self.H, self.T, self.V)
            exact = torch.float64 if self.dtype == torch.float64 else torch.float32
            x["bias"] = torch.randn(self.H, generator=g).to(exact)
            x["weight"] = (0.3 * torch.randn(self.H, self.D, generator=g)).to(exact)
            # Sinks are real and do not count.
            x["counts"] = mask & (torch.rand(self.B, S, generator=g) > 0.2)
            x["number"] = self.gone(x["counts"]).sum(-1)
            if self.before:
                x["before"] = 3 * torch.randn(self.B, self.HKV, self.D, generator=g).to(exact)
                x["number"] = x["number"] + 5
        if self.kept:
            every = self.kept + self.T
            x["kept_k"], x["kept_v"] = draw(self.HKV, every, self.D), draw(self.HKV, every, self.V)
            x["slot"], x["begins"], x["ends"] = self.choice()
            if self.own:
                x["gone"] = draw(self.HKV, self.T, self.D)
                x["number"] = (torch.rand(self.B, self.T, generator=g) > 0.5).cumsum(1) + 5 * self.before
        return x

    def choice(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw which place a key takes that comes, and between which queries each key is in sight."""
        choose = random.Random(self.seed)
        slot = torch.full((self.B, self.HKV, self.T), -1)
        begins = torch.full((self.B, self.kept + self.T), NOWHERE)
        ends = torch.full((self.B, self.HKV, self.kept + self.T), NOWHERE)
        for b in range(self.B):
            taken = choose.randint(0, self.kept)
            begins[b, :taken] = -1
            places = [list(range(taken)) for _ in range(self.HKV)]
            for t in (t for t in range(self.T) if choose.random() < 0.7):
                new = self.kept + t
                begins[b, new] = t
                for head, held in enumerate(places):
                    place = len(held) if len(held) < self.kept else choose.choice([-1, *range(self.kept)])
                    slot[b, head, t] = place
                    if place == len(held):
                        held.append(new)
                    elif place < 0:
                        ends[b, head, new] = t
                    else:
                        ends[b, head, held[place]] = t
                        held[place] = new
        return slot, begins, ends

    def distance(self) -> Tensor:
        """Return how far back each key is, ``[T, S]``."""
        return self.past + torch.arange(self.T)[:, None] - torch.arange(self.past + self.T)[None]

    def gone(self, counts: Tensor) -> Tensor:
        """Return which keys each query's own key stands for, ``[B, T, S]``."""
        return counts[:, None] & (self.distance() >= self.window)


LEAVES = ("q", "k", "v", "sink_k", "sink_v", "f", "bias", "weight", "before", "kept_k", "kept_v", "gone")


def defined(case: Case, x: dict[str, Tensor], *, constant: bool = False) -> Tensor:
    """Return o by its definition, dense, in the dtype of what it gets; where asked with a constant for the mass."""
    group = case.H // case.HKV
    k, v = (x[name].repeat_interleave(group, 1) for name in ("k", "v"))
    distance = case.distance()
    near = (distance >= 0) & (distance < case.window)
    near = near & (x["mask"][:, None] | (distance == 0)) if case.masked else near.expand(case.B, -1, -1)
    scores = [(SCALING * x["q"] @ k.mT).masked_fill(~near[:, None], -torch.inf)]
    values = [v[:, :, None].expand(-1, -1, case.T, -1, -1)]
    if case.sinks:
        sink_k, sink_v = (x[name].repeat_interleave(group, 1) for name in ("sink_k", "sink_v"))
        scores.append((SCALING * x["q"] @ sink_k.mT).masked_fill(~x["seen"][:, None], -torch.inf))
        values.append(sink_v[:, :, None].expand(-1, -1, case.T, -1, -1))
    if case.kept:
        kept_k, kept_v = (x[name].repeat_interleave(group, 1) for name in ("kept_k", "kept_v"))
        t = torch.arange(case.T)[:, None]
        seen = (x["begins"][:, None, None] <= t) & (t < x["ends"][:, :, None])
        hidden = ~seen.repeat_interleave(group, 1)
        scores.append((SCALING * x["q"] @ kept_k.mT).masked_fill(hidden, -torch.inf))
        values.append(kept_v[:, :, None].expand(-1, -1, case.T, -1, -1))
    if case.own:
        keys = case.gone(x["counts"])[:, None].to(k.dtype) @ k
        if case.kept:
            keys = x["gone"].repeat_interleave(group, 1).cumsum(2)
        if case.before:
            keys = keys + x["before"].repeat_interleave(group, 1)[:, :, None]
        n = x["number"][:, None]
        some = n.clamp(min=1).to(k.dtype)
        own = (x["q"] * (SCALING * keys / some[..., None] + x["weight"][:, None])).sum(-1)
        own = own + x["bias"][:, None] + some.log()
        scores.append(own.masked_fill(n == 0, -torch.inf)[..., None])
        values.append(x["f"][:, :, :, None])
    every = torch.cat(scores, -1)
    mass = every.logsumexp(-1, keepdim=True)
    weights = (every - (mass.detach() if constant else mass)).exp()
    return (weights[..., None, :] @ torch.cat(values, -2)).squeeze(-2)


def attended(case: Case, x: dict[str, Tensor], backend: str) -> Tensor:
    """Return o of one backend."""
    own = None
    if case.own:
        own = OwnKey(x["f"], x["bias"], x["weight"], x["counts"], x["number"], x.get("before"), x.get("gone"))
    kept = KeptKeys(*(x[n] for n in ("kept_k", "kept_v", "slot", "begins", "ends"))) if case.kept else None
    return window_attention(
        *(x[name] for name in ("q", "k", "v")),
        window=case.window,
        scaling=SCALING,
        key_mask=x.get("mask"),
        sinks=(x["sink_k"], x["sink_v"], x["seen"]) if case.sinks else None,
        own_key=own,
        kept=kept,
        backend=backend,
    )


def run(case: Case, backend: str, inputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the output and the gradients of ``sum(o do)``.

    ``definition`` computes in float64, and so does ``parts``, but without the gradient through the softmax's mass: dq
    and dk are differences of that and what it gives, so errors are relative to the larger of both.
    """
    x = case.inputs() if inputs is None else dict(inputs)
    exact = backend in ("definition", "parts")
    leaves = {name: (x[name].double() if exact else x[name]).detach().requires_grad_() for name in LEAVES if name in x}
    x |= leaves
    if exact:
        o = defined(case, x, constant=backend == "parts")
    else:
        o = attended(case, x, backend)
        assert o.dtype == case.dtype
    o.backward(x["do"].to(o.dtype))
    return {"o": o.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def check(case: Case, backend: str) -> None:
    x = case.inputs()
    exact, parts, found = (run(case, name, x) for name in ("definition", "parts", backend))
    for name, expected in exact.items():
        # A bias has one number a head: a sum over all queries, of terms of both signs.
        tolerance = TOLERANCE[case.dtype] * (2 if name == "dbias" else 1)
        rows = (found[name].double() - expected).norm(dim=-1)
        scale = torch.maximum(expected.norm(dim=-1), parts[name].norm(dim=-1))
        typical = scale.square().mean().sqrt()
        if typical == 0:
            assert (rows == 0).all(), f"{case}: {name} is not zero"
            continue
        whole, worst = rows.norm() / scale.norm(), (rows / scale.clamp(min=0.1 * typical)).max()
        assert whole <= tolerance, f"{case}: {name} off by {whole:.1e}"
        assert worst <= 10 * tolerance, f"{case}: a row of {name} off by {worst:.1e}"


def let_blocks_hold(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum keys over blocks of so many tokens."""
    monkeypatch.setattr(problem, "BLOCK", tokens)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small problems have several blocks where the interpreter's tiles divide them."""
    if DEVICE.type == "cpu":
        let_blocks_hold(16, monkeypatch)


CORNERS = [
    Case(),
    Case(T=1, past=7, own=True, before=True, sinks=2, masked=True),
    Case(T=3, past=7, own=True, before=True, sinks=2, masked=True),
    Case(T=50, past=20, window=20, own=True, before=True, sinks=4, masked=True),
    Case(T=50, past=32, window=32, own=True, before=True),
    Case(T=37, window=1, own=True),
    Case(T=20, window=64, own=True, masked=True),
    Case(T=49, window=16, own=True, sinks=17),
    Case(T=35, H=6, HKV=2, D=24, V=40, own=True, sinks=3, masked=True, layout="bthd"),
    Case(T=35, sinks=3, masked=True, layout="bthd"),
    Case(T=35, kept=5),
    Case(T=3, past=7, kept=3, sinks=2, masked=True),
    Case(T=65, H=2, D=24, V=40, kept=17, sinks=3, masked=True, layout="bthd"),
    Case(T=50, past=20, window=20, own=True, before=True, kept=2, sinks=4, masked=True),
    Case(T=50 * SCALE, window=9 * SCALE, past=9 * SCALE, own=True, before=True, sinks=4, masked=True),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_known_corners(case: Case, backend: str) -> None:
    check(case, backend)


def drawn(seed: int, dtype: torch.dtype) -> Case:
    choose = random.Random(seed)
    own, HKV = choose.random() < 0.8, choose.choice([1, 2])
    width = choose.randint(1, 40 * SCALE)
    continued = choose.random() < 0.4
    return Case(
        B=choose.choice([1, 2]),
        H=HKV * choose.choice([1, 2]),
        HKV=HKV,
        T=choose.randint(1, 40 * SCALE),
        past=width if continued else 0,
        D=choose.choice([8, 16, 20]),
        V=choose.choice([8, 16, 20]),
        window=width,
        sinks=choose.choice([0, 1, 4]),
        own=own,
        before=own and continued,
        masked=choose.random() < 0.5,
        layout=choose.choice(["bhtd", "bthd"]),
        kept=choose.choice([0, 0, 1, 9]),
        dtype=dtype,
        seed=seed,
    )


@pytest.mark.parametrize("seed", spread(range(6), 5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_drawn_problems(seed: int, dtype: torch.dtype) -> None:
    check(drawn(seed, dtype), "triton")


@pytest.mark.parametrize("seed", range(20))
def test_drawn_problems_in_torch(seed: int) -> None:
    check(drawn(seed, torch.float64), "torch")


@pytest.mark.parametrize("tile", [16, 8])
def test_blocks_of_several_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of keys are those of blocks, however many tiles of queries or of keys a block has."""
    if DEVICE.type == "cpu":
        let_blocks_hold(2 * tile if tile == 16 else 64, monkeypatch)
    check(Case(B=1, T=100, window=21, own=True, sinks=1, masked=True), "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 2])
def test_scores_of_their_own_are_not_rounded_to_half_precision(tokens: int, backend: str) -> None:
    q = torch.zeros(1, 1, tokens, 8, dtype=torch.bfloat16)
    q[..., 0] = 60
    k = torch.zeros_like(q)
    k[..., 0] = 1
    counts = torch.zeros(1, tokens, dtype=torch.bool)
    # bf16 has 60.25.
    own_key = OwnKey(
        torch.ones_like(q), torch.tensor([60.2]), torch.zeros(1, 8), counts, torch.ones(1, tokens, dtype=torch.int64)
    )
    o = window_attention(q, k, torch.zeros_like(q), window=1, scaling=1.0, own_key=own_key, backend=backend)
    assert o.float().mean().item() == pytest.approx(1 / (1 + math.exp(-0.2)), abs=0.004)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [-300.0, 300.0])
def test_scores_far_apart_do_not_overflow(bias: float, backend: str) -> None:
    case = Case(B=1, T=30, own=True, sinks=1)
    x = case.inputs()
    x["bias"] = torch.full_like(x["bias"], bias)
    exact, found = run(case, "definition", x), run(case, backend, x)
    for name in ("o", "dv", "df"):
        torch.testing.assert_close(found[name].double(), exact[name], atol=1e-5, rtol=1e-4)


def positional(case: Case) -> tuple[object, ...]:
    x = case.inputs()
    leaves = {name: x[name].requires_grad_() for name in LEAVES if name in x}
    codes = x["mask"].to(torch.uint8) + 2 * x["counts"].to(torch.uint8) if case.own else None
    names = ("f", "number", "before", "bias", "weight")
    x |= leaves
    own = [x.get(name) for name in (*names, "given", "kept_k", "kept_v", "slot", "begins", "ends")]
    held = problem.held_by_block(KeptKeys(*own[6:])) if case.kept else None
    sinks = x.get("sink_k"), x.get("sink_v"), x.get("seen")
    return (x["q"], x["k"], x["v"], codes, *sinks, *own, held, case.window, SCALING)


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=3, D=8, V=4),
        Case(B=1, T=20, D=8, V=4, own=True, masked=True, sinks=1, past=7, before=True),
        Case(B=1, T=20, D=8, V=4, kept=2),
    ],
    ids=["window", "own", "kept"],
)
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(op.triton_window, positional(case))


@pytest.mark.parametrize("backend", BACKENDS)
def test_can_be_recomputed_in_the_backward(backend: str) -> None:
    x = Case(B=1, T=20).inputs()

    def gradients(*, again: bool) -> list[Tensor]:
        leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v")]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return window_attention(q, k, v, window=7, scaling=SCALING, backend=backend)

        o = checkpoint(attend, *leaves, use_reentrant=False) if again else attend(*leaves)
        o.backward(x["do"])
        return [leaf.grad for leaf in leaves]

    for found, expected in zip(gradients(again=True), gradients(again=False), strict=True):
        assert torch.equal(found, expected)


# PyTorch decomposes forward-mode derivatives by scripts of its own.
def test_derivatives_in_torch_are_those_of_its_plain_form() -> None:
    g = torch.Generator(DEVICE).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=g, dtype=torch.float64).requires_grad_()

    number = torch.arange(5)[None]
    counts = torch.ones(1, 7, dtype=torch.bool)

    def attend(q: Tensor, k: Tensor, v: Tensor, value: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        own = OwnKey(value, bias, weight, counts, number)
        return window_attention(q, k, v, window=3, scaling=SCALING, own_key=own, backend="torch")

    inputs = draw(1, 2, 5, 4), draw(1, 1, 7, 4), draw(1, 1, 7, 3), draw(1, 2, 5, 3), draw(2), draw(2, 4)
    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, inputs)


def test_compiles_without_graph_breaks() -> None:
    case = Case(B=1, T=20, own=True, sinks=1)
    x = case.inputs()
    own = OwnKey(x["f"], x["bias"], x["weight"], x["counts"], x["number"])

    def loss(q: Tensor) -> Tensor:
        sinks = x["sink_k"], x["sink_v"], x["seen"]
        o = window_attention(q, x["k"], x["v"], window=7, scaling=SCALING, sinks=sinks, own_key=own, backend="triton")
        return o.square().sum()

    def gradient(function: object) -> Tensor:
        q = x["q"].clone().requires_grad_()
        function(q).backward()
        return q.grad

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(gradient(compiled), gradient(loss))


@pytest.mark.parametrize("case", [CORNERS[3], CORNERS[9], CORNERS[12]], ids=str)
def test_writes_all_it_allocates(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = run(case, "triton")
    poison(monkeypatch)
    for name, x in run(case, "triton").items():
        assert torch.equal(x, clean[name]), name


def test_same_bits_twice_and_in_every_layout() -> None:
    case = Case(B=1, T=35, D=20, own=True, sinks=1, masked=True, dtype=torch.bfloat16)
    x = case.inputs()
    first = run(case, "triton", x)
    # Same numbers, other strides: tokens before heads, and a slice of a wider tensor.
    names = ("q", "k", "v", "f", "do")
    moved = x | {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in names}
    sliced = x | {name: torch.cat([x[name], x[name]], -1)[..., : x[name].shape[-1]] for name in names}
    for inputs in (x, moved, sliced):
        for name, y in run(case, "triton", inputs).items():
            assert torch.equal(y, first[name]), name


def test_offsets_beyond_32_bits() -> None:
    # The storage is virtual: only the pages that hold the two rows are ever touched.
    stride = 2**31 + 64
    storage = torch.empty(stride + 5 * 16, dtype=torch.bfloat16)
    far = storage.as_strided((2, 1, 5, 16), (stride, 80, 16, 1))
    near = torch.randn(2, 1, 5, 16).bfloat16()
    far.copy_(near)
    settings = {"window": 2, "scaling": SCALING, "backend": "triton"}
    assert torch.equal(window_attention(far, far, far, **settings), window_attention(near, near, near, **settings))


def test_a_backend_that_cannot_run_here_is_refused() -> None:
    q = torch.zeros(1, 1, 4, 512)
    with pytest.raises(BackendError, match="q has head size 512, and the kernels hold at most 256"):
        window_attention(q, q, q, window=2, scaling=1.0, backend="triton")
    q = torch.zeros(1, 1, 4, 160)
    with pytest.raises(BackendError, match="in fp32 the window's kernels hold at most 128 dimensions; use backend="):
        window_attention(q, q, q, window=2, scaling=1.0, backend="triton")


@pytest.mark.parametrize(("H", "HKV"), [(32, 8), (32, 32)])
def test_counted_traffic(H: int, HKV: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor crosses memory once: 3 U + 2 U_kv, and for the sums of keys k once more."""
    let_blocks_hold(64, monkeypatch)
    T, D = 131_072, 128

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    q, k, v, f = (empty(1, T, heads, D).transpose(1, 2) for heads in (H, HKV, HKV, H))
    p = WindowProblem(
        Target("sm_90", 132),
        *(q, k, v, empty(1, T, dtype=torch.uint8)),
        *(empty(1, HKV, 4, D), empty(1, HKV, 4, D), empty(1, T, 4, dtype=torch.uint8)),
        *(f, empty(1, T, dtype=torch.int64), None, empty(H), empty(H, D), None, None),
        window=64,
        scaling=0.1,
    )
    U = q.nbytes
    U_kv = U * HKV // H

    def traffic(launches: list[Launch]) -> int:
        return sum(x.nbytes for launch in launches for x in (*launch.reads, *launch.writes))

    saved, launches = window_launches(p)
    assert [launch.role for launch in launches] == ["key_sums", "key_scan", "window"]
    # Sums of 64 keys in fp32 are 1/32 of them: written and read by the scan, whose result is written.
    assert traffic(launches) <= 3 * U + 3.1 * U_kv + 2 * saved.lse.nbytes
    _, backward = window_backward_launches(p, saved, torch.empty_like(saved.o))
    assert [launch.role for launch in backward] == ["window_dq", "key_scan", "window_dkv"]
    assert traffic(backward) <= 8.1 * U + 6 * U_kv + 8 * saved.lse.nbytes
    # Kept keys and their values come in beside the window's. Of each 64 queries, 128 keys get gradients in fp32, which
    # are written and read again.
    lies = KeptKeys(
        *(empty(1, HKV, 64 + T, D), empty(1, HKV, 64 + T, D), empty(1, HKV, T, dtype=torch.int64)),
        *(empty(1, 64 + T, dtype=torch.int64), empty(1, HKV, 64 + T, dtype=torch.int64)),
    )
    own = dict.fromkeys(("f", "number", "before", "bias", "weight"))
    kept = p._replace(**own, kept=problem.Kept(*lies, problem.held_by_block(lies)))
    saved, alone = window_launches(kept)
    assert [launch.role for launch in alone] == ["window_kept"]
    assert traffic(alone) <= 2 * U + 4.1 * U_kv + saved.lse.nbytes
    _, gradients = window_backward_launches(kept, saved, torch.empty_like(saved.o))
    assert [launch.role for launch in gradients] == [
        *("window_dq_kept", "window_dkept", "kept_sums", "window_dkv"),
    ]
    assert traffic(gradients) <= 8.1 * U + 28.1 * U_kv + 8 * saved.lse.nbytes
    for launch in (*launches, *backward):
        large = {id(x) for x in launch.arguments.values() if isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] == T}
        assert large == {id(x) for x in (*launch.reads, *launch.writes) if x.ndim == 4 and x.shape[2] == T}


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor wants a C++ compiler")
@pytest.mark.parametrize(("tokens", "window", "sinks"), [(16, 4, 0), (40, 1, 0), (100, 64, 4)])
def test_inductor_takes_gradients_on_a_cpu(tokens: int, window: int, sinks: int) -> None:
    """Once it made code that wrote where it may not, for windows in one block, and code that did not compile."""

    def attend(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
        seen = sinks_in_sight(place, 0, tokens, window)
        first = (k[:, :, :sinks], v[:, :, :sinks], seen) if sinks else None
        return window_attention(q, k, v, window=window, scaling=0.3, sinks=first, backend="torch")

    threads, compiled = torch.get_num_threads(), torch.compile(attend, dynamic=False)
    torch.set_num_threads(2)
    try:
        for seed in range(30):
            g = torch.Generator().manual_seed(seed)
            leaves = [torch.randn(1, n, tokens, 8, generator=g).requires_grad_() for n in (4, 2, 2)]
            do, place = torch.randn(1, 4, tokens, 8, generator=g), torch.arange(sinks)[None]
            found, wanted = (torch.autograd.grad(step(*leaves, place), leaves, do) for step in (compiled, attend))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(threads)
        torch.compiler.reset()
