"""Turning queries and keys back in PyTorch: what is turned comes back, and so do first and second gradients."""

import pytest
import torch

from hf_linear_attn.ops.rotation import Layout, Rotation
from tests.ops.oracle import DEVICE

LAYOUTS = [Layout("half"), Layout("half", at_end=True), Layout("next"), Layout("next", at_end=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("width", [4, 8])
def test_what_was_turned_comes_back_and_has_gradients(layout: Layout, width: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    angles = torch.rand(1, 5, width // 2, dtype=torch.float64, generator=generator) * 6
    # YaRN scales cosines and sines, too.
    rotation = Rotation(1.25 * torch.cat([angles.cos(), angles.sin()], -1), layout)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    torch.testing.assert_close(rotation.undo(rotation.do(x)), x)
    assert not torch.allclose(rotation.undo(x), x)
    assert torch.autograd.gradcheck(rotation.undo, x)
    assert torch.autograd.gradgradcheck(rotation.undo, x)


def test_angles_are_read_at_every_call() -> None:
    """Also where their memory is written by what PyTorch does not see, as a graph's replay or NumPy."""
    cos, sin, x = torch.ones(1, 5, 8), torch.zeros(1, 5, 8), torch.randn(1, 2, 5, 8)
    assert torch.equal(Rotation.of(cos, sin, Layout("half")).do(x), x)
    cos.data.zero_()
    sin.data.fill_(1)
    assert torch.equal(Rotation.of(cos, sin, Layout("half")).do(x)[..., :4], -x[..., 4:])
