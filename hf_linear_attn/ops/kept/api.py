"""The choice of the keys that are kept beyond a window, as one node of a graph, and who makes it."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.dispatch import choose_backend, tensor_obstacle, wants_loops
from hf_linear_attn.ops.kept.problem import Choice, Entering
from hf_linear_attn.ops.kept.torch import choose_torch
from hf_linear_attn.ops.library import operator, refuse_vmap
from hf_linear_attn.ops.triton.plan import padded
from hf_linear_attn.tracing import is_transformed

LARGEST = 2**16
"""Numbers that the kernel holds of a head's keys."""


def choose_kept(call: Entering, backend: str = "auto") -> Choice:
    """Choose the keys that are kept where there is room for C of those that leave a window.

    A key that leaves the window is kept. Where there would be more than C, one goes: the one whose value a later key's
    has come closest to, though not the one that comes; or, where keys have scores, the one with the least score for its
    age. Of several the oldest goes. So a query, or how a text is cut into calls, has no say in it. What is computed is
    said by :func:`hf_linear_attn.ops.hybrid.hybrid_reference`.

    Args:
        call: The keys.
        backend: As in :func:`linear_attention`. A kernel chooses on a GPU and a loop on a CPU, of what is fp32 or less,
            and else PyTorch.

    Returns:
        The choice, which has no gradients.

    Raises:
        BackendError: If the backend asked for cannot run here.
    """
    call = call._replace(compared=call.compared.detach())
    if torch.compiler.is_compiling():
        return Choice(*choose_op(*call, backend))
    return _choose(call, backend)


def _choose(call: Entering, backend: str) -> Choice:
    compared, sizes = call.compared, (call.at.shape[2], call.compared.shape[3])
    chosen = choose_backend(backend, compared.device, lambda: tensor_obstacle(compared) or choice_obstacle(*sizes))
    if chosen == "triton":
        # Imported here so that the package needs neither Triton nor a GPU.
        from hf_linear_attn.ops.kept.triton import choose_triton

        return choose_triton(call)
    if wants_loops(backend, compared.device) and compared.dtype != torch.float64 and not is_transformed():
        # Imported here so that the package needs no Numba.
        from hf_linear_attn.ops.kept.numba import choose_numba

        return choose_numba(call)
    return choose_torch(call)


def choice_obstacle(keys: int, width: int) -> str | None:
    """Say why no kernel can choose among so many keys of a head, of which so many numbers each are compared."""
    if padded(keys) * padded(width) <= LARGEST:
        return None
    return f"the kernel that chooses keys cannot hold {keys} of a head, of which {width} numbers each are compared"


def _choose_plain(*inputs: Any) -> tuple[Tensor, ...]:
    """Choose, token by token, what would be a graph as long as the text."""
    *call, backend = inputs
    return tuple(x.clone() for x in _choose(Entering(*call), backend))


def _allocate(compared: Tensor, enters: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _, _, nearest, at, *_ = others
    slot = at.new_empty(*at.shape[:2], enters.shape[1])
    return slot, torch.empty_like(slot), torch.empty_like(at), torch.empty_like(nearest), torch.empty_like(at)


choose_op = operator(
    "choose_kept",
    _choose_plain,
    _allocate,
    schema="(Tensor compared, Tensor enters, Tensor positions, Tensor number, Tensor nearest, Tensor at, "
    "SymInt window, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
refuse_vmap("torch", choose_op)
