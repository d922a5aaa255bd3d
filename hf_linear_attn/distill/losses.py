"""What distillation minimises.

Every loss is a sum over tokens, so that a step's mean does not depend on how they are spread over forwards and
processes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def kl_loss(student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Sum ``w KL(p_teacher || p_student)`` over tokens, on the full vocabulary at temperature 1, in nats, fp32.

    Logits are ``[N, vocabulary]``, of any floating dtype, and weights ``[N]``, >= 0.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0]])
        >>> kl_loss(logits, logits + 3, torch.ones(1)).item()
        0.0
    """
    log_p = teacher.float().log_softmax(-1)
    log_q = student.float().log_softmax(-1)
    return (F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * weights).sum()


def ce_loss(student: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum ``-w log p_student(target)`` over tokens, in nats, fp32.

    Logits are ``[N, vocabulary]``, next tokens ``[N]`` int64, and weights ``[N]``, >= 0.
    """
    return (F.cross_entropy(student.float(), targets, reduction="none") * weights).sum()


def output_loss(student: Tensor, softmax: Tensor, weights: Tensor) -> Tensor:
    """Sum ``w ||o_student - o_softmax||^2 / (V var(o_softmax))`` over tokens and average over heads.

    Divided by the variance, layers whose outputs are large do not drown the others, and 1 is what the mean output
    would score. Outputs of a layer's heads are ``[B, H, T, V]``, weights ``[B, T]``, >= 0, and the sum is fp32.
    """
    softmax = softmax.float()
    error = (student.float() - softmax).square().mean(dim=(1, 3))
    return (error * weights).sum() / softmax.var().clamp_min(torch.finfo(torch.float32).tiny)


def hidden_loss(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Return ``mean_t ||h_student - h_teacher||^2 / (D var(h_teacher))`` over a text's tokens, as :func:`output_loss`.

    A layer's hidden states are ``[B, T, D]``; ``real [B, T]`` bool is False in padding. The errors of texts are ``[B]``
    fp32.
    """
    teacher = teacher.float()
    error = (student.float() - teacher).square().mean(-1) * real
    return error.sum(1) / real.sum(1) / teacher[real].var(0).mean().clamp_min(torch.finfo(torch.float32).tiny)


def weights_loss(student: Tensor, softmax: Tensor, weights: Tensor) -> Tensor:
    """Sum ``-w sum_j p_ij log a_ij`` over queries i and average over heads, in nats, fp32.

    The linear attention weights a and softmax's p are ``[B, H, T, T]``, rows summing to 1; w is ``[B, T]``, >= 0
    (Hedgehog, Zhang et al., 2024). 1e-6 is added to a before the logarithm.
    """
    entropy = -(softmax.float() * (student.float() + 1e-6).log()).sum(-1).mean(1)
    return (entropy * weights).sum()
