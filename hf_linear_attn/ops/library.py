"""What the ops registered with torch.library refuse alike."""

from typing import Any, NoReturn

import torch

from hf_linear_attn.errors import BackendError


def refuse_transforms(backend: str, *ops: Any, backward: Any) -> None:
    """Make second derivatives of a backend's ops, and vmap over them, say what works instead.

    Args:
        backend: The backend's name.
        *ops: Its ops from ``torch.library.custom_op``.
        backward: The one that computes gradients.
    """

    def refuse(transform: str, remedy: str) -> NoReturn:
        raise BackendError("backend", f"be 'reference' {transform}", backend, remedy)

    def second_derivative(ctx: Any, *gradients: Any) -> NoReturn:
        refuse("for second derivatives", "Its backward is not differentiable.")

    torch.library.register_autograd(backward, second_derivative)
    refuse_vmap(backend, *ops, backward)


def refuse_vmap(backend: str, *ops: Any) -> None:
    """Make vmap over a backend's ops say what works instead."""

    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        raise BackendError(
            "backend", "be 'reference' under vmap", backend, "Make the mapped dimension part of the batch."
        )

    for op in ops:
        torch.library.register_vmap(op, vmap)
