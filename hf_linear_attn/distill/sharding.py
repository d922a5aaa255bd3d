"""Sharding a model over processes with torch's ``fully_shard`` (FSDP2), and what several processes hold together."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_linear_attn.distill.forward import map_parameters
from hf_linear_attn.errors import UnsupportedError


def shard(model: nn.Module, mixed_precision: str = "no") -> None:
    """Shard a model's parameters over all processes, layer by layer, in place.

    Feature maps and mixing weights stay whole on every process: attention transfer runs their backward inside the
    forward, when a sharded layer's parameters are not to be had. With ``bf16`` as mixed precision, weights are gathered
    and computed with in bf16, and gradients reduced in fp32.

    Raises:
        UnsupportedError: If the model does not say which modules are its layers.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        rule = "be False for a model that does not name its layers in _no_split_modules"
        remedy = "Leave it out, or shard the model yourself and pass it in."
        raise UnsupportedError("shard", rule, True, remedy, where=type(model).__name__)
    dtype = torch.bfloat16 if mixed_precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    maps = map_parameters(model)
    for module in (*layers, model):
        fully_shard(module, ignored_params=maps, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether any parameter is sharded."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Put the parameters of a sharded model back in place: after a forward without backward the root's are whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def average_gradients(parameters: Iterable[nn.Parameter], processes: int) -> None:
    """Average the gradients of replicated parameters over processes; sharded ones are averaged by torch already.

    A parameter that took no part on any process keeps None, so that the optimiser leaves it alone.
    """
    if processes == 1:
        return
    replicated = [p for p in parameters if not isinstance(p, DTensor)]
    used = torch.tensor([p.grad is not None for p in replicated], dtype=torch.float32)
    if not replicated:
        return
    used = used.to(replicated[0].device)
    dist.all_reduce(used)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, count in zip(replicated, used.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([x.flatten() for x in gradients])
        dist.all_reduce(flat)
        flat /= processes
        for x, mean in zip(gradients, torch.split(flat, [x.numel() for x in gradients]), strict=True):
            x.copy_(mean.view_as(x))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a total norm of ``max_norm``, but of 0 not at all; return the norm before."""
    used = [p for p in parameters if p.grad is not None]
    squares = []
    for sharded in (False, True):
        group = [p.grad for p in used if isinstance(p, DTensor) is sharded]
        if group:
            norm = torch.nn.utils.get_total_norm(group)  # type: ignore[arg-type]
            squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())
    total = torch.stack(squares).sum().sqrt()
    if max_norm:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for parameter in used:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))  # type: ignore[union-attr]
    return total.item()


def whole(x: Any, keep: bool) -> Any:
    """Return a sharded tensor whole, on the CPU, where it is kept; every process must call it.

    Gathered one by one, so that a device never holds more than one tensor that is whole.
    """
    if not isinstance(x, DTensor):
        return x
    gathered = x.full_tensor()
    return gathered.cpu() if keep else None


def full_tensors(model: nn.Module, names: Iterable[str], keep: bool) -> dict[str, Tensor]:
    """Return whole parameters by name, those of sharded ones where they are kept; every process must call it."""
    parameters = dict(model.named_parameters())
    return {name: whole(parameters[name].detach(), keep) for name in sorted(names) if name in parameters}


def full_optimizer_state(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """Return an optimiser's state dict with whole tensors where they are kept; every process must call it."""
    state = optimizer.state_dict()
    state["state"] = {
        index: {key: whole(x, keep) for key, x in values.items()} for index, values in state["state"].items()
    }
    return state


def distributed_like(x: Tensor, parameter: Tensor) -> Tensor:
    """Return ``x`` sharded as ``parameter`` is, if it is."""
    if not isinstance(parameter, DTensor):
        return x
    return torch.distributed.tensor.distribute_tensor(
        x.to(parameter.device), parameter.device_mesh, parameter.placements
    )


def whole_state(model: nn.Module, keep: bool) -> dict[str, Tensor] | None:
    """Return a sharded model's state dict with whole tensors on the CPU where it is kept, None for any other model."""
    reshard(model)
    if not is_sharded(model):
        return None
    return {name: whole(x, keep) for name, x in model.state_dict().items()}
