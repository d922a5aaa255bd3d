"""What the kernels' ops have in common: the target they are planned for, and running a plan."""

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.triton.plan import Launch, Target, target_of


def target_for(device: torch.device) -> Target:
    """Return the target that a device stands for.

    Raises:
        BackendError: If there are no kernels for it.
    """
    target = target_of(device)
    if target is None:
        raise BackendError(
            "backend", "be able to run here", "triton", f"There are no kernels for {device}; use backend='torch'."
        )
    return target


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return ``x`` contiguous, where there is one."""
    return None if x is None else x.contiguous()


def run(device: torch.device, launches: list[Launch]) -> None:
    """Run a plan on a device."""
    with torch.cuda.device(device if device.type == "cuda" else -1):
        for launch in launches:
            launch.run()
