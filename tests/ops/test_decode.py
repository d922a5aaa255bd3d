import pytest
import torch

from hf_linear_attn import LinearAttentionState, linear_attention
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.step import copies_of, decode, decode_state, decode_step_
from hf_linear_attn.ops.triton.plan import Target
from tests.ops.oracle import DEVICE

BACKENDS = ("torch", "triton")


def draw(H: int, HKV: int, T: int, D: int, V: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator(DEVICE).manual_seed(T)
    return tuple(
        torch.randn(2, T, heads, dim, generator=g).to(dtype).transpose(1, 2)
        for heads, dim in ((H, D), (HKV, D), (HKV, V))
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("H", "HKV", "D", "V", "copies", "phi", "dtype"),
    [
        (2, 2, 16, 16, 1, "elu", torch.float32),
        (4, 2, 20, 40, 2, "relu", torch.float32),
        (3, 1, 16, 40, 3, "elu", torch.bfloat16),
        (2, 1, 16, 33, 1, "identity", torch.float16),
        (2, 2, 8, 40, None, "exp", torch.float32),
    ],
)
def test_decode_is_causal_attention(
    backend: str, H: int, HKV: int, D: int, V: int, copies: int | None, phi: str, dtype: torch.dtype
) -> None:
    q, k, v = draw(H, HKV, 11, D, V, dtype)
    if phi == "identity":
        q, k = q.abs(), k.abs()
    mask = torch.rand(2, 11, generator=torch.Generator(DEVICE).manual_seed(0)) > 0.3
    mask[1, 6:] = False
    expected, final = linear_attention(
        q.double(), k.double(), v.double(), feature_map=phi, key_mask=mask, backend="reference"
    )
    kv, z = torch.zeros(2, HKV, D, V), torch.zeros(2, HKV, D)
    if copies is not None:
        z = torch.zeros(2, HKV, copies, D)
    state = LinearAttentionState(kv, z)
    addresses = kv.data_ptr(), z.data_ptr()
    pieces = [
        decode_step_(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], state, phi=phi, key_mask=mask[:, a:b], backend=backend)
        for a, b in ((0, 1), (1, 2), (2, 5), (5, 6), (6, 11))
    ]
    o = torch.cat(pieces, 2)
    assert o.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(o.double(), expected, rtol=tolerance, atol=tolerance)
    # Sums of the state are fp32 whatever the tokens are.
    torch.testing.assert_close(kv.double(), final.kv.double(), rtol=1e-5, atol=1e-5)
    each = z[:, :, None] if z.ndim == 3 else z
    for copy in each.unbind(2):
        torch.testing.assert_close(copy.double(), final.z.double(), rtol=1e-5, atol=1e-5)
        assert torch.equal(copy, each[:, :, 0])
    assert addresses == (kv.data_ptr(), z.data_ptr())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("copies", "dtype"), [(None, torch.float32), (3, torch.bfloat16)])
def test_sums_fade_as_in_causal_attention(backend: str, copies: int | None, dtype: torch.dtype) -> None:
    q, k, v = draw(4, 2, 11, 16, 40, dtype)
    g = torch.Generator(DEVICE).manual_seed(0)
    mask, log_decay = torch.rand(2, 11, generator=g) > 0.3, -3 * torch.rand(2, 11, 2, generator=g).transpose(1, 2)
    log_decay = torch.where(mask[:, None], log_decay, torch.nan)
    expected, final = linear_attention(
        q.double(), k.double(), v.double(), key_mask=mask, log_decay=log_decay, backend="reference"
    )
    sizes = (2, 2, 16) if copies is None else (2, 2, copies, 16)
    state = LinearAttentionState(torch.zeros(2, 2, 16, 40), torch.zeros(sizes))
    pieces = []
    for a, b in ((0, 1), (1, 2), (2, 7), (7, 8), (8, 11)):
        tokens = (x[:, :, a:b] for x in (q, k, v))
        step = {"key_mask": mask[:, a:b], "log_decay": log_decay[:, :, a:b], "backend": backend}
        pieces.append(decode_step_(*tokens, state, **step))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(torch.cat(pieces, 2).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.kv.double(), final.kv.double(), rtol=1e-5, atol=1e-5)
    for copy in state.z.view(2, 2, -1, 16).unbind(2):
        torch.testing.assert_close(copy.double(), final.z.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_step_forgets_all_at_a_log_decay_of_minus_infinity(backend: str, tokens: int) -> None:
    """Sums of large numbers, too; a masked token forgets nothing."""
    q, k, v = draw(4, 2, tokens, 16, 40, torch.float32)
    log_decay, mask = torch.full((2, 2, tokens), -torch.inf), torch.ones(2, tokens, dtype=torch.bool)
    mask[1] = False
    state = LinearAttentionState(torch.full((2, 2, 16, 40), 1e30), torch.full((2, 2, 16), 1e30))
    o = decode_step_(q, k, v, state, key_mask=mask, log_decay=log_decay, backend=backend)
    # Every query sees its own key alone.
    torch.testing.assert_close(o[:1], v[:1].repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)
    last = torch.nn.functional.elu(k[0, :, -1]) + 1
    torch.testing.assert_close(state.z[0], last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.kv[0], last[..., None] * v[0, :, -1, None], rtol=1e-5, atol=1e-5)
    assert (state.kv[1] == 1e30).all()
    assert (state.z[1] == 1e30).all()


def test_a_step_refuses_sums_that_grow() -> None:
    # On a GPU nobody waits to see it: the device stops.
    q, k, v = (x.cpu() for x in draw(2, 2, 1, 8, 8, torch.float32))
    state = decode_state(2, 2, 8, 8, device="cpu")
    with pytest.raises(ArgumentError, match="`log_decay` must be at most 0"):
        decode_step_(q, k, v, state, log_decay=torch.ones(2, 2, 1, device="cpu"), backend="torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_rows_keep_their_state(backend: str) -> None:
    q, k, v = draw(2, 2, 4, 8, 8, torch.float32)
    state = LinearAttentionState(torch.randn(2, 2, 8, 8), torch.rand(2, 2, 8))
    before = state.kv.clone(), state.z.clone()
    decode_step_(q, k, v, state, key_mask=torch.tensor([[True] * 4, [False] * 4]), backend=backend)
    assert torch.equal(state.kv[1], before[0][1])
    assert torch.equal(state.z[1], before[1][1])
    assert not torch.equal(state.kv[0], before[0][0])


def test_decode_state_is_empty_and_fits() -> None:
    q, k, v = draw(4, 2, 1, 8, 6, torch.float32)
    state = decode_state(2, 2, 8, 6, device=DEVICE)
    assert state.kv.shape == (2, 2, 8, 6)
    assert state.z.shape == (2, 2, 1, 8)
    o = decode_step_(q, k, v, state)
    torch.testing.assert_close(o, v.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


def test_decode_takes_float64() -> None:
    q, k, v = (x.double() for x in draw(2, 2, 3, 8, 8, torch.float32))
    state = LinearAttentionState(torch.zeros(2, 2, 8, 8).double(), torch.zeros(2, 2, 8).double())
    o = decode_step_(q, k, v, state)
    torch.testing.assert_close(o, linear_attention(q, k, v, return_state=False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_stepped_where_they_lie_in_a_pool(backend: str) -> None:
    """They lie apart, as in pages; a masked row's, and those beside them, stay as they were."""
    q, k, v = draw(4, 2, 3, 16, 40, torch.float32)
    pages = torch.randn(5, 4000, generator=torch.Generator(DEVICE).manual_seed(0)).abs()
    pool = LinearAttentionState(pages[:, 8:1288].view(5, 2, 16, 40), pages[:, 2000:2032].view(5, 2, 16))
    before, rows, mask = pages.clone(), torch.tensor([3, 0]), torch.tensor([[True] * 3, [True, False, False]])
    log_decay = -torch.rand(2, 2, 3, generator=torch.Generator(DEVICE).manual_seed(1))
    own = LinearAttentionState(*(x[rows].clone() for x in pool))
    for t in range(3):
        tokens, now = [x[:, :, t : t + 1] for x in (q, k, v)], slice(t, t + 1)
        options = {"key_mask": mask[:, now], "log_decay": log_decay[:, :, now], "backend": backend}
        o = decode_step_(*tokens, pool, rows=rows, **options)
        torch.testing.assert_close(o, decode_step_(*tokens, own, **options), rtol=1e-5, atol=1e-5)
    for x, y in zip(pool, own, strict=True):
        torch.testing.assert_close(x[rows], y, rtol=1e-5, atol=1e-5)
        x[rows] = 0
    for x in LinearAttentionState(before[:, 8:1288].view(5, 2, 16, 40), before[:, 2000:2032].view(5, 2, 16)):
        x[rows] = 0
    assert torch.equal(pages, before)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_state_that_does_not_fit_is_refused(backend: str) -> None:
    """A kernel would write beyond it, also where one that fits was stepped before."""
    q, k, v = draw(2, 2, 1, 8, 8, torch.float32)
    kv, z = state = decode_state(2, 2, 8, 8, device=q.device)
    decode_step_(q, k, v, state, backend=backend)
    for name, one, rule in (
        ("kv", kv[:1], r"have shape \(2, 2, 8, 8\), got \(1, 2, 8, 8\)"),
        ("kv", kv[:, :, :5], r"have shape \(2, 2, 8, 8\), got \(2, 2, 5, 8\)"),
        ("kv", kv.half(), "be torch.float32, got torch.float16"),
        ("kv", kv.mT, "be contiguous, to be updated in place"),
        ("z", z[..., :4], r"have shape \(2, 2, 1, 8\)"),
        ("z", z.double(), "be torch.float32, got torch.float64"),
        ("z", z.expand(2, 2, 9, 8), "have 1 to V = 8 copies, got 9"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=f"`state.{name}` must {rule}"):
            decode_step_(q, k, v, state._replace(**{name: one}), backend=backend)
    for mask in (torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 1, dtype=torch.uint8)):
        with pytest.raises(ArgumentError, match=r"`key_mask` must be bool of shape \[B, T\] = \(2, 1\)"):
            decode_step_(q, k, v, state, key_mask=mask, backend=backend)
    with pytest.raises(ArgumentError, match="`k` must have a head count that divides q's 3"):
        decode_step_(torch.cat([q, q], 1)[:, :3], k, v, state, backend=backend)
    with pytest.raises(ArgumentError, match="`backend` must be a known backend, got 'gpu'"):
        decode_step_(q, k, v, state, backend="gpu")


@pytest.mark.parametrize(
    ("rows", "copies", "word"),
    [
        (torch.tensor([1]), (), "`rows` must be int64 of shape (2,)"),
        (torch.tensor([0.0, 1.0]), (), "`rows` must be int64"),
        (torch.tensor([0, 1]), (2,), "`state.z` must have no copies in a pool"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(rows: torch.Tensor, copies: tuple[int, ...], word: str) -> None:
    q, k, v = draw(2, 2, 1, 8, 8, torch.float32)
    state = LinearAttentionState(torch.zeros(5, 2, 8, 8), torch.zeros(5, 2, *copies, 8))
    with pytest.raises(ArgumentError) as error:
        decode_step_(q, k, v, state, rows=rows, backend="torch")
    assert word in str(error.value)


def test_a_traced_step_does_not_look_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is a file, at which a graph would break, in every layer."""
    monkeypatch.setattr(decode, "target_of", lambda device: Target("sm_90", 132))

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + (copies_of(torch.device("cuda", 0), "decode", 64, 64) or 0)

    assert int(torch.compile(step, backend="eager", fullgraph=True)(torch.zeros((), dtype=torch.int64))) == 2
