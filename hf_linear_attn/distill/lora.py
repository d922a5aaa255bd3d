"""LoRA on the attention projections of a patched model, through PEFT."""

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.patching import is_patched, part_of


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the projections of a patched model's converted layers by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if part_of(module) is None:
            continue
        for child_name, child in module.named_modules():
            if isinstance(child, (nn.Linear, Conv1D)) and "linear_attention" not in child_name:
                found[f"{name}.{child_name}"] = child
    return found


def add_lora(model: PreTrainedModel, *, rank: int, alpha: float) -> PeftModel:
    """Put adapters of a rank, scaled by ``alpha / rank``, into a patched model.

    They go on the attention projections, found by inspection; feature maps and mixing weights are trained whole and
    saved with the adapter, since a freshly patched base has untrained ones.

    Raises:
        UnsupportedError: If no projection is found.
    """
    found = projections(model)
    if not found or not is_patched(model):
        remedy = "Call patch_model first, or train with trainable='full'."
        raise UnsupportedError("model", "be patched and have attention projections", type(model).__name__, remedy)
    leaves = {name.rpartition(".")[2] for name in found}
    elsewhere = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name not in found
    }
    # Short names where they are unambiguous: GPT-2 calls a projection of its MLP as one of its attention.
    targets = leaves if not leaves & elsewhere else set(found)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=sorted(targets),
        modules_to_save=["linear_attention"],
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in found.values()),
        task_type="CAUSAL_LM" if model.can_generate() else "FEATURE_EXTRACTION",
    )
    return get_peft_model(model, config)
