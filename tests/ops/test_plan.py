"""What the launch plan says: traffic, tiles, segments. Nothing here runs a kernel."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from hf_linear_attn.ops.hybrid.triton import prefill
from hf_linear_attn.ops.hybrid.triton.trade import hybrid_launches
from hf_linear_attn.ops.linear_attention.triton.backward import Saved, Wanted, backward_launches, save
from hf_linear_attn.ops.linear_attention.triton.forward import forward_launches
from hf_linear_attn.ops.triton import plan
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, Target
from tests.ops.conftest import cut_as

H200 = Target("sm_90", 132)
# B, H, HKV, D and N.
SHAPES = [
    (1, 32, 8, 128, 2_048),
    (1, 32, 8, 128, 8_192),
    (1, 32, 32, 128, 8_192),
    (8, 32, 32, 64, 8_192),
    (1, 32, 8, 128, 32_768),
    (1, 32, 8, 128, 131_072),
    (4, 32, 32, 128, 4_096),
]
CUTS = {"whole": (False, None), "carried": (False, 1024), "stored": (True, 256)}


def problem(B: int, H: int, HKV: int, D: int, N: int, *, causal: bool = True) -> Problem:
    q, k, v = (
        torch.empty(B, N, heads, D, dtype=torch.bfloat16, device="meta").transpose(1, 2) for heads in (H, HKV, HKV)
    )
    return Problem(H200, q, k, v, None, None, None, None, "elu", causal, 0)


def tensor_bytes(launches: list[Launch]) -> int:
    """Sum the bytes of q, k, v, o and their gradients that cross memory; rows of a group share k and v in L2."""
    return sum(x.numel() * x.element_size() for a in launches for x in (*a.reads, *a.writes) if x.ndim == 4)


def row_bytes(launches: list[Launch]) -> int:
    """Sum the bytes of the normalisers and deltas, one number per query."""
    return sum(x.numel() * x.element_size() for a in launches for x in (*a.reads, *a.writes) if x.ndim == 3)


def saved_bytes(p: Problem, saved: Saved) -> int:
    return sum(x.numel() * x.element_size() for x in (p.q, p.k, p.v, *saved) if x is not None)


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize(("B", "H", "HKV", "D", "N"), SHAPES)
def test_counted_traffic(B: int, H: int, HKV: int, D: int, N: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_as(monkeypatch, *CUTS[kind])
    p = problem(B, H, HKV, D, N)
    U = B * H * N * D * 2
    U_kv = U * HKV // H
    split = kind != "whole"
    out, launches = forward_launches(p, 1e-6)
    walk = "stored_forward" if kind == "stored" else "forward"
    assert [a.role for a in launches] == (["state", "scan", walk] if split else [walk])
    assert tensor_bytes(launches) == 2 * U + (4 if split else 2) * U_kv
    assert row_bytes(launches) == B * H * N * 4

    saved = save(p, out)
    _, backward = backward_launches(p, saved, torch.empty_like(out.o), out.kv, out.z)
    # dk and dv in one launch read q, do and their rows once.
    merged = kind == "stored"
    assert ("stored_dkv" in [a.role for a in backward]) == merged
    assert (
        tensor_bytes(backward) == (10 if split else 9) * U - merged * 2 * U + (9 if split else 7) * U_kv - merged * U_kv
    )
    # Four bytes per query: delta, then two reads by dq and dk each and one by dv.
    assert row_bytes(backward) == ((7 if split else 6) - merged) * B * H * N * 4
    assert saved_bytes(p, saved) <= 4.04 * U


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_keys_and_values_of_256_features_read_queries_once(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_as(monkeypatch, *CUTS["stored"])
    q, k = (torch.empty(1, heads, 1_024, 256, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    p = Problem(Target(arch, 132), q, k, k[..., :128], None, None, None, None, "identity", True, 64)
    out, _ = forward_launches(p, 1e-6)
    given = save(p, out), torch.empty_like(out.o), None, None
    (both,) = (a for a in backward_launches(p, *given)[1] if a.role.startswith("stored_d") and a.role != "stored_dq")
    assert both.arguments["APART"]
    # A program for dk and one for dv of each tile and key head.
    assert both.programs == 2 * 2 * 1_024 // both.tile.tokens
    assert sum(x is p.q for x in both.reads) == 1
    found, launches = backward_launches(p, *given, Wanted(v=False, state=False))
    (alone,) = (a for a in launches if a.role == "stored_dk")
    assert not alone.arguments["APART"]
    assert alone.writes == (found.dk,)


def test_bidirectional_traffic() -> None:
    p = problem(1, 32, 32, 128, 8_192, causal=False)
    U = 32 * 8_192 * 128 * 2
    out, launches = forward_launches(p, 1e-6)
    assert tensor_bytes(launches) == 4 * U
    _, backward = backward_launches(p, save(p, out), torch.empty_like(out.o), out.kv, out.z)
    assert tensor_bytes(backward) == (3 + 3 + 3 + 2) * U


def test_launches_declare_the_tensors_they_take() -> None:
    p = problem(1, 4, 2, 64, 8_192)
    out, launches = forward_launches(p, 1e-6)
    _, backward = backward_launches(p, save(p, out), torch.empty_like(out.o), out.kv, out.z)
    for launch in [*launches, *backward]:
        large = {
            id(x)
            for x in launch.arguments.values()
            if isinstance(x, torch.Tensor) and x.ndim >= 3 and x.shape[2] == 8_192
        }
        assert large == {id(x) for x in (*launch.reads, *launch.writes)}, launch.role


@pytest.mark.parametrize(("rows", "tokens", "length"), [(1, 100_000, 1_024), (3, 5_000, 64), (1, 600, 600)])
def test_segments_cover_each_token_once(rows: int, tokens: int, length: int) -> None:
    segments = plan.cut(tokens, rows, length, None)
    assert segments.split == (tokens > length)
    assert segments.count == rows * segments.per_row
    assert segments.per_row * segments.length >= tokens > (segments.per_row - 1) * segments.length


@pytest.mark.parametrize("lengths", [(5_000, 0, 1, 3_000), (64,), (0, 0, 9_000)])
@pytest.mark.parametrize("length", [64, 512, 10_000])
def test_packed_segments_cover_each_token_once(lengths: tuple[int, ...], length: int) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    total = int(bounds[-1])
    segments: Segments = plan.cut(total, len(lengths), length, bounds)
    assert segments.split == (total > length)
    seen = torch.zeros(total, dtype=torch.int64)
    for n, first, start, end in segments.table.tolist():
        assert first == bounds[n]
        if end > start:
            assert bounds[n] <= start < end <= bounds[n + 1]
            seen[start:end] += 1
    assert (seen == 1).all()
    if segments.bounds is not None:
        for n in range(len(lengths)):
            rows = segments.table[segments.bounds[n] : segments.bounds[n + 1]]
            assert (rows[:, 0] == n).all()
            assert int((rows[:, 3] - rows[:, 2]).sum()) == lengths[n]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "gfx942", "interpreter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_table_has_every_size(arch: str, dtype: torch.dtype) -> None:
    for D in (1, 16, 48, 64, 80, 128, 200, 256):
        for V in (1, 64, 96, 256):
            for role in ("state", "scan", "forward", "delta", "reverse_state", "dq", "dk", "dv", "decode"):
                tile = plan.tile(Target(arch, 8), dtype, role, D, V, 3)
                assert tile.tokens >= 16 or role in ("scan", "decode")
                assert tile.width & (tile.width - 1) == 0
                if role == "decode":
                    assert tile.width <= plan.padded(V)
                elif role not in ("scan", "delta"):
                    assert tile.width <= plan.padded_for(Target(arch, 8), dtype, V if role in ("forward", "dv") else D)


@pytest.mark.parametrize(("D", "V"), [(4, 128), (128, 1), (20, 20)])
def test_warp_groups_get_no_narrow_operands(D: int, V: int) -> None:
    """What ptxas 12.8 makes of those is wrong, and what processors without warp groups get stays as narrow."""

    def widths(arch: str) -> list[int]:
        def t(dim: int) -> torch.Tensor:
            return torch.empty(1, 2, 300, dim, dtype=torch.bfloat16, device="meta")

        p = Problem(Target(arch, 132), t(D), t(D), t(V), None, None, None, None, "elu", True, 0)
        out, forward = forward_launches(p, 1e-6)
        _, backward = backward_launches(p, save(p, out), torch.empty_like(out.o), out.kv, out.z)
        walks = [x for x in (*forward, *backward) if x.role not in ("scan", "delta")]
        return [x.arguments[size] for x in walks for size in ("BD", "BV") if size in x.arguments]

    assert min(widths("sm_90")) >= 64
    assert min(widths("sm_80")) < 64


def test_table_prefers_the_row_of_that_group(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ["sm_90", "bf16", "dk", 64, 64, 0, 64, 64, 4, 2],
        ["sm_90", "bf16", "dk", 64, 64, 4, 32, 32, 8, 1],
    ]
    table = plan.parse_table(json.dumps({"version": plan.TABLE_VERSION, "tiles": rows}))
    monkeypatch.setattr(plan, "tile_table", lambda: table)
    assert plan.tile(H200, torch.bfloat16, "dk", 64, 64, 4).warps == 8
    assert plan.tile(H200, torch.bfloat16, "dk", 64, 64, 2).warps == 4


def test_table_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=f"tile table has version 0, not {plan.TABLE_VERSION}; tune again"):
        plan.parse_table('{"version": 0, "tiles": []}')


def test_table_survives_its_file() -> None:
    assert plan.parse_table(plan.format_table(plan.tile_table())) == dict(plan.tile_table())


@pytest.mark.parametrize(
    ("dtype", "D", "setting", "precision"),
    [
        (torch.float32, 128, "highest", "tf32x3"),
        (torch.float32, 256, "highest", "ieee"),
        (torch.float32, 256, "high", "tf32"),
        (torch.float16, 128, "highest", "tf32"),
        (torch.bfloat16, 128, "highest", "ieee"),
    ],
)
def test_precision_of_products(dtype: torch.dtype, D: int, setting: str, precision: str) -> None:
    x = torch.empty(1, 1, 64, D, dtype=dtype, device="meta")
    p = Problem(H200, x, x, x, None, None, None, None, "elu", True, 0)
    try:
        torch.set_float32_matmul_precision(setting)
        assert p.precision == precision
        # AMD has no tf32.
        assert p._replace(target=Target("gfx942", 304)).precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("pooled", [False, True])
def test_a_step_of_many_rows_reads_a_maps_weights_once_for_a_tile_of_rows(
    pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    problems = importlib.import_module("problems")
    D, heads = 128, 32 + 8
    names = ("weight_q", "power_q", "weight_k", "power_k")

    def launches(batch: int) -> list[Launch]:
        step = problems.hybrid_problem(problem(batch, 32, 8, D, 1))
        step = step._replace(**{name: getattr(step, name).bfloat16() for name in names})
        return hybrid_launches(H200, problems.in_pool(step) if pooled else step)[1]

    def size(*tensors: torch.Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    alone, (ahead, step) = launches(1), launches(64)
    assert [a.role.removesuffix("_rows") for a in (*alone, ahead, step)] == ["hybrid", "ahead", "hybrid_given"]
    assert all(step.arguments[name] is None for name in names)
    # A program reads the weights of one head, for 16 rows.
    assert ahead.programs == heads * 64 / 16
    given = size(*ahead.writes)
    least = size(*step.reads, *step.writes) - given + heads * D * D * 2
    # Every program of a head reads the head's features; the kernel ahead reads a query and a key for each of them.
    copies = step.arguments["C"]
    moved = least + (1 + copies) * given + 64 * heads * D * 2 + (ahead.programs - heads) * D * D * 2
    assert moved < 1.3 * least


def test_heads_of_80_and_96_are_64_columns_and_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (64, 72, 80, 96, 112, 128)
    monkeypatch.setattr(prefill, "NARROW", True)
    found = [prefill.in_parts(dim, plan.padded(dim)) for dim in sizes]
    assert found == [(64, 0), (128, 0), (64, 16), (64, 32), (128, 0), (128, 0)]
    # Triton 3.6 and 3.7 cannot.
    monkeypatch.setattr(prefill, "NARROW", False)
    assert [prefill.in_parts(dim, plan.padded(dim)) for dim in sizes] == [(plan.padded(dim), 0) for dim in sizes]
