import torch

from hf_linear_attn.distill.losses import ce_loss, kl_loss, output_loss, weights_loss

generator = torch.Generator().manual_seed(0)


def test_kl_is_the_weighted_divergence_from_the_teacher():
    student, teacher = torch.randn(2, 5, 7, generator=generator)
    weights = torch.tensor([0.0, 1.0, 2.0, 0.5, 1.0])
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    expected = (weights * (p * (p / q).log()).sum(-1)).sum()
    torch.testing.assert_close(kl_loss(student, teacher, weights).double(), expected, rtol=1e-5, atol=1e-6)
    assert kl_loss(student.bfloat16(), teacher.bfloat16(), weights).dtype == torch.float32


def test_ce_is_the_weighted_negative_log_likelihood():
    student, targets = torch.randn(4, 7, generator=generator), torch.tensor([1, 0, 6, 2])
    weights = torch.tensor([1.0, 0.0, 3.0, 1.0])
    picked = student.double().softmax(-1)[range(4), targets]
    expected = -(weights * picked.log()).sum().float()
    torch.testing.assert_close(ce_loss(student, targets, weights), expected)


def test_output_loss_does_not_depend_on_the_scale_of_a_layer():
    student, softmax = torch.randn(2, 2, 3, 6, 4, generator=generator)
    weights = torch.ones(2, 6)
    loss = output_loss(student, softmax, weights)
    torch.testing.assert_close(output_loss(7 * student, 7 * softmax, weights), loss)
    expected = (student - softmax).square().mean((1, 3)).sum() / softmax.var()
    torch.testing.assert_close(loss, expected)


def test_padding_takes_no_part_in_the_output_loss():
    student, softmax = torch.randn(2, 1, 3, 6, 4, generator=generator)
    weights = torch.tensor([[1.0] * 4 + [0.0] * 2])
    changed = student.clone()
    changed[:, :, 4:] = 99
    torch.testing.assert_close(output_loss(changed, softmax, weights), output_loss(student, softmax, weights))


def test_weights_loss_is_least_where_the_weights_are_softmaxs():
    softmax = torch.randn(1, 2, 5, 5, generator=generator).softmax(-1)
    other = torch.randn(1, 2, 5, 5, generator=generator).softmax(-1)
    weights = torch.ones(1, 5)
    assert weights_loss(softmax, softmax, weights) < weights_loss(other, softmax, weights)
    expected = -(softmax * (other + 1e-6).log()).sum(-1).mean(1).sum()
    torch.testing.assert_close(weights_loss(other, softmax, weights), expected)
