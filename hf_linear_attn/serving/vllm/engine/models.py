"""vLLM's model classes with converted layers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.kv_cache_interface import KVCacheSpec

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import CheckpointError, UnsupportedError
from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.patching.saving import PREFIX, register_names_in_files
from hf_linear_attn.serving.vllm.checks import check_attention, settings_of
from hf_linear_attn.serving.vllm.engine.layer import ConvertedAttention, converted_layers
from hf_linear_attn.serving.vllm.layer_types import own_layer_types
from hf_linear_attn.serving.vllm.weights import MARK, key_of, take_own


def convert(base: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a vLLM model class of that name, whose converted layers attend linearly; its softmax kin's is the base."""

    class Converted(base):  # type: ignore[misc, valid-type]
        """A model of vLLM's with converted layers."""

        is_hybrid = True
        has_inner_state = True
        supports_mamba_prefix_caching = True

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
            config = vllm_config.model_config.hf_config
            register_names_in_files(name.removeprefix(PREFIX))
            with own_layer_types(config):
                super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
            replace_attention(self, settings_of(config, str(vllm_config.model_config.model)), vllm_config)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            """Load the folder's weights, those of the converted layers by this rank's heads."""
            state = self.state_dict(keep_vars=True)
            own = {key_of(name): x.data for name, x in state.items() if MARK in name}
            rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            loaded: set[str] = super().load_weights(take_own(weights, own, rank, ranks))
            return loaded | {name for name, _ in self.named_parameters() if MARK in name}

        @classmethod
        def get_mamba_specs_from_config(cls, vllm_config: VllmConfig) -> list[KVCacheSpec]:
            """Describe the pages of all converted layers: the largest sets the size of those beside it."""
            specs = [layer.get_kv_cache_spec(vllm_config) for layer in converted_layers(vllm_config)]
            return [spec for spec in specs if spec is not None]

        def get_mamba_state_copy_funcs(self, types: Iterable[Any]) -> dict[Any, Any]:
            """Say how a state is copied where a prefix is shared: whole, tensor by tensor."""
            layer = next(module for module in self.modules() if isinstance(module, ConvertedAttention))
            return dict.fromkeys(types, (get_temporal_copy_spec,) * len(layer.page))

    Converted.__name__ = Converted.__qualname__ = name
    return Converted


def replace_attention(model: nn.Module, settings: LinearAttentionConfig, vllm_config: VllmConfig) -> None:
    """Put converted layers in the place of the attention of vLLM's model, and into its config's table of layers.

    Raises:
        CheckpointError: If there are fewer layers than the folder names.
        UnsupportedError: If one has what linear attention cannot honour.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    chosen = settings.layers or ()
    if not chosen or max(chosen) >= len(found):
        rule = f"be indices of the {len(found)} attention layers that vLLM builds"
        remedy = "vLLM builds another model than Transformers: serve it with Transformers."
        raise CheckpointError("layers", rule, list(chosen), remedy, where=type(model).__name__)
    for index in chosen:
        name, attention = found[index]
        parent_name, _, child = name.rpartition(".")
        parent: Any = model.get_submodule(parent_name)
        sizes = check_attention(attention, settings, name)
        rotary = _rotary_of(parent, settings, vllm_config, name)
        part = LinearAttention(settings.of_layer(index), sizes, name, rotated=rotary is not None)
        dtype = attention.dtype
        parent.linear_attention = part.to(dtype=dtype).eval().requires_grad_(False)
        layer = ConvertedAttention(part, attention.layer_name, attention.head_size_v, dtype, rotary)
        setattr(parent, child, layer)
        vllm_config.compilation_config.static_forward_context[attention.layer_name] = layer


def _rotary_of(parent: Any, settings: LinearAttentionConfig, vllm_config: VllmConfig, name: str) -> Any:
    """Return the module by which a layer turns queries and keys, where that is to be undone; None where nothing is."""
    if settings.rotary != "undo":
        return None
    rotary, config = getattr(parent, "rotary_emb", None), vllm_config.model_config.hf_config
    if rotary is None and not getattr(config, "rope_parameters", None):
        return None
    table = getattr(rotary, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or not hasattr(rotary, "is_neox_style"):
        rule = "be 'keep' where vLLM does not say how it rotates"
        raise UnsupportedError("rotary", rule, type(rotary).__name__, "Serve the model with Transformers.", where=name)
    return rotary
