"""In which precision weights are kept, computed with and saved.

A step of Adam moves a weight by about its learning rate, and most weights are a thousand times as large and more: bf16,
with 8 bits, rounds nearly all of such steps away. So what is trained is kept in fp32, or in bf16 by an optimiser that
keeps what rounding drops (:mod:`hf_linear_attn.distill.optimizer`); what is frozen stays as the checkpoint has it, and
autocast computes in bf16 with both.
"""

from collections.abc import Iterable, Mapping

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor

from hf_linear_attn.distill.forward import map_parameters
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages import Stage

HALVES = (torch.bfloat16, torch.float16)
PEFT_PLACES = ("base_model.model.", "base_layer.", "original_module.", "modules_to_save.default.")
"""What PEFT puts into the names of parameters that it wraps."""


def resolve(settings: DistillationSettings, student: nn.Module, launcher: str) -> DistillationSettings:
    """Return the settings with the precision that ``auto`` stands for: the launcher's, or else what the model needs."""
    if settings.mixed_precision != "auto":
        return settings
    device = next(student.parameters()).device.type
    available = device == "meta" or torch.amp.is_autocast_available(device)
    halves = available and any(p.dtype in HALVES for p in student.parameters())
    return settings.with_changes(mixed_precision="bf16" if halves or launcher == "bf16" else "no")


def raise_precision(parameters: Iterable[nn.Parameter]) -> None:
    """Keep parameters of 16 bits in fp32, in place."""
    for parameter in parameters:
        # What is quantised says that it is bf16.
        if parameter.dtype in HALVES and type(parameter.data) in (torch.Tensor, DTensor):
            parameter.data = parameter.data.float()


def raise_trained(settings: DistillationSettings, stage: Stage) -> None:
    """Keep in fp32 what a stage trains; where other weights are kept in bf16, what is new is not."""
    maps = map_parameters(stage.student)
    raise_precision(p for p in stage.parameters if settings.master_weights == "fp32" or p in maps)


def restore_precision(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Bring a model's parameters back to the dtypes they had, in place; adapters, which are new, keep theirs."""
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(plain_name(name))
        if dtype is not None and dtype != parameter.dtype and dtype.is_floating_point:
            parameter.data = parameter.data.to(dtype)


def plain_name(name: str) -> str:
    """Return the name that a parameter has without PEFT.

    Example:
        >>> plain_name("base_model.model.lm_head.base_layer.weight")
        'lm_head.weight'
    """
    for place in PEFT_PLACES:
        name = name.replace(place, "")
    return name


def let_autocast_cast(model: nn.Module, autocast: bool) -> None:
    """Leave the inputs of adapters to autocast, where it is on: PEFT would first make fp32 copies of them."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = not autocast  # type: ignore[assignment]
