import pytest
import torch

from hf_linear_attn.distill.optimizer import LeanAdamW, dequantise, quantise, round_stochastically


def run(optimizer_class, dtype=torch.float32, steps=200, lr=1e-4, **options):
    """Return where a weight ends that is pulled towards zero by a noisy gradient."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(40, 64, dtype=dtype))
    optimizer = optimizer_class([weight], lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **options)
    for _ in range(steps):
        weight.grad = (torch.randn(weight.shape, generator=generator) + 0.5).to(dtype)
        optimizer.step()
    return weight.detach().float()


def test_in_fp32_it_is_adamw():
    torch.testing.assert_close(run(LeanAdamW), run(torch.optim.AdamW), rtol=1e-6, atol=1e-7)


def test_bf16_weights_lose_nothing_to_rounding():
    expected = run(torch.optim.AdamW)
    # Each step is below half the distance of bf16's numbers near 1, so that plain rounding stands still.
    assert (run(torch.optim.AdamW, torch.bfloat16) == 1).all()
    moved = (1 - expected).mean().item()
    compensated = run(LeanAdamW, torch.bfloat16, rounding="compensated")
    assert (compensated - expected).abs().max() < 2**-8 + 0.05 * moved
    stochastic = run(LeanAdamW, torch.bfloat16, rounding="stochastic")
    assert (1 - stochastic).mean().item() == pytest.approx(moved, rel=0.05)


def test_8_bit_moments_take_nearly_the_same_way():
    expected, found = run(torch.optim.AdamW), run(LeanAdamW, eight_bits=True)
    assert (found - expected).abs().mean() < 0.02 * (1 - expected).mean()


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_hold_large_and_small_numbers(signed):
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-9, 6).repeat(20)
    x = x if signed else x.abs()
    x = x.sort(dim=1).values
    codes, scales = quantise(x, signed=signed)
    assert (codes.dtype, codes.numel(), scales.numel()) == (torch.uint8, 1500, 6)
    found = dequantise(codes, scales, signed=signed).view_as(x)
    of_block = scales.repeat_interleave(256)[:1500].view_as(x)
    large = x.abs() > 0.01 * of_block
    assert ((found - x).abs() / x.abs())[large].max() < 0.15
    assert ((found - x).abs() / of_block).max() < 0.02
    assert torch.equal(dequantise(*quantise(torch.zeros(7), signed=signed), signed=signed), torch.zeros(7))


def test_stochastic_rounding_is_right_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    for value in (1.001, -3.0001, 1e-20, 0.0):
        rounded = round_stochastically(torch.full((20000,), value), generator)
        assert torch.equal(rounded, rounded.bfloat16().float())
        assert rounded.mean().item() == pytest.approx(value, rel=1e-4)
        assert len(rounded.unique()) <= 2
