"""Exactness over many tokens: what a state in too little precision, or a sum in fp16, would lose."""

import pytest
import torch
import torch.nn.functional as F

from hf_linear_attn import LinearAttentionState, linear_attention
from hf_linear_attn.ops.step import decode_state, decode_step_
from tests.ops.oracle import DEVICE


@pytest.mark.slow
def test_100k_decoded_bf16_tokens_keep_the_normaliser() -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    tokens, piece = 100_000, 2_000
    state = decode_state(1, 1, 8, 8, device=DEVICE)
    z = torch.zeros(8, dtype=torch.float64)
    for _ in range(tokens // piece):
        k = torch.randn(1, 1, piece, 8, generator=g).bfloat16()
        for x in k.split(1, 2):
            decode_step_(x, x, x, state, backend="torch")
        z += (F.elu(k[0, 0].double()) + 1).sum(0)
    torch.testing.assert_close(state.z[0, 0, 0].double(), z, rtol=1e-3, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_fp16_at_64k_tokens(backend: str) -> None:
    # Sums over 64k tokens are beyond fp16's 65504, those of values with a mean too, and their reciprocals near its
    # least. That column has no gradient: dq would be a difference of nearly equal terms, and measure cancellation.
    g = torch.Generator(DEVICE).manual_seed(0)
    T, D, V, last = 65_536, 128, 16, 64
    q, k = (torch.randn(1, 1, T, D, generator=g).half() for _ in range(2))
    v, do = (torch.randn(1, 1, T, V, generator=g).half() for _ in range(2))
    v[..., 0] += 2
    do[..., 0] = 0
    phi_k = F.elu(k[0, 0].double()) + 1
    v64 = v[0, 0].double()
    before = LinearAttentionState((phi_k[:-last].T @ v64[:-last])[None, None], phi_k[:-last].sum(0)[None, None])

    state = None
    if backend == "triton":
        # Interpreted, 64k tokens take minutes: the kernels get the state of all but the last.
        q, k, v, do = (x[:, :, -last:] for x in (q, k, v, do))
        state = LinearAttentionState(before.kv.float(), before.z.float())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, final = linear_attention(*leaves, state=state, backend=backend)
    o.backward(do)

    expected_leaves = [x[:, :, -last:].detach().double().requires_grad_() for x in (q, k, v)]
    expected, expected_final = linear_attention(*expected_leaves, state=before, backend="reference")
    expected.backward(do[:, :, -last:].double())
    assert float(expected_final.z.detach().min()) > 65504
    assert float(expected_final.kv.detach().max()) > 65504
    assert all(x.grad.isfinite().all() for x in leaves)
    for found, right in [
        (o[:, :, -last:], expected),
        (final.kv, expected_final.kv),
        (final.z, expected_final.z),
        # Gradients of the last keys are of the order of 1e-6, of which fp16 itself holds one or two digits.
        *((x.grad[:, :, -last:], y.grad) for x, y in zip(leaves, expected_leaves, strict=True)),
    ]:
        floor = 2**-24 * right.numel() ** 0.5
        assert float((found.detach().double() - right.detach()).norm()) <= 2e-3 * float(right.detach().norm()) + floor


def test_a_million_tokens_in_pieces() -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    T, piece = 1_000_000, 62_500
    q, k, v = (torch.randn(1, 1, T, 8, generator=g) for _ in range(3))
    v += 1
    exact, final = linear_attention(q.double(), k.double(), v.double(), backend="torch")
    state: LinearAttentionState | None = None
    worst = 0.0
    for a in range(0, T, piece):
        part = slice(a, a + piece)
        o, state = linear_attention(q[:, :, part], k[:, :, part], v[:, :, part], state=state, backend="torch")
        worst = max(worst, float((o.double() - exact[:, :, part]).norm() / exact[:, :, part].norm()))
    assert worst <= 1e-4
    assert float((state.kv.double() - final.kv).norm() / final.kv.norm()) <= 1e-4
    assert float((state.z.double() - final.z).norm() / final.z.norm()) <= 1e-4
