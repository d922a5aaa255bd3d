"""What is refused before a weight is loaded, of a folder and of how it is to be served. Nothing here imports vLLM."""

from collections.abc import Mapping
from typing import Any

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import CheckpointError, UnsupportedError
from hf_linear_attn.layers import Sizes

SUPPORTED_VERSIONS = ("0.32.0",)
"""Versions of vLLM that were tested. What the plugin touches is no public interface, and changes."""

SPECULATION = ("ngram",)
"""Ways of drafting that were tested."""

ACTS_ON_SCORES = {
    "logits_soft_cap": "a soft-cap on the scores",
    "alibi_slopes": "a bias on the scores by distance (ALiBi)",
    "sinks": "a learned attention sink",
}
"""Attributes of vLLM's attention that act on the matrix of scores, which linear attention does not have."""


def is_supported(version: str) -> bool:
    """Tell whether a version of vLLM is supported, whatever it was built for."""
    return version.partition("+")[0] in SUPPORTED_VERSIONS


def check_version(version: str) -> None:
    """Refuse a version of vLLM that is not supported.

    Raises:
        UnsupportedError: Naming it and those that are.
    """
    if not is_supported(version):
        rule = "be a version that this plugin was tested with"
        raise UnsupportedError("vllm", rule, version, "Install one of those", available=SUPPORTED_VERSIONS)


def settings_of(config: Any, where: str) -> LinearAttentionConfig:
    """Read off its config how a folder was converted.

    Raises:
        CheckpointError: If the folder is a plain softmax model, of a newer format, or does not say which layers.
        UnsupportedError: If it has parts besides a language model.
    """
    values = getattr(config, "linear_attention", None)
    if not isinstance(values, Mapping):
        rule = "stand in config.json of a converted folder"
        remedy = "Serve a softmax model under its own architecture, or convert it and save it with save_pretrained."
        raise CheckpointError("linear_attention", rule, values, remedy, where=where)
    settings = LinearAttentionConfig.from_dict(values)
    if settings.layers is None:
        raise CheckpointError(
            "layers", "be named by a converted folder", None, "Load it with from_pretrained and save it.", where=where
        )
    text = config.get_text_config(decoder=True)
    if text is not config:
        remedy = "Towers for images or sound were not tested; serve it with Transformers."
        raise UnsupportedError("model", "be a language model alone", type(config).__name__, remedy, where=where)
    return settings


def check_serving(vllm_config: Any) -> None:
    """Refuse what a converted model cannot be served with.

    Raises:
        UnsupportedError: Naming the option and its remedy.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    speculative, where = vllm_config.speculative_config, str(vllm_config.model_config.model)

    def refuse(option: str, rule: str, value: object, remedy: str) -> None:
        raise UnsupportedError(option, rule, value, remedy, where=where)

    if parallel.pipeline_parallel_size > 1:
        refuse("pipeline_parallel_size", "be 1", parallel.pipeline_parallel_size, "Use tensor_parallel_size instead.")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            refuse(name, "be 1", getattr(parallel, name), "A state has no tokens to divide among ranks.")
    if vllm_config.lora_config is not None:
        refuse("enable_lora", "be off", True, "Merge the adapter with PEFT's merge_and_unload, and save that.")
    if vllm_config.kv_transfer_config is not None:
        refuse("kv_transfer_config", "be left out", "a connector", "States are not handed to other servers.")
    if speculative is not None:
        drafts = getattr(speculative, "draft_model_config", None)
        # Where nothing but n-grams drafts, vLLM names the model itself.
        if speculative.method not in SPECULATION and drafts is not None and str(drafts.model) == where:
            remedy = "vLLM tells its layers nothing of rejected tokens: draft by n-grams there, or with Transformers."
            refuse("speculative_config", "name a softmax model as the one that drafts", speculative.method, remedy)
        if speculative.method not in SPECULATION:
            rule = f"use a method that was tested, {', '.join(SPECULATION)}"
            refuse("speculative_config", rule, speculative.method, "Another could leave rejected tokens in a state.")
        if cache.enable_prefix_caching:
            refuse(
                "enable_prefix_caching",
                "be off where tokens are drafted",
                True,
                "Pass --no-enable-prefix-caching, or leave speculation out.",
            )
    if cache.mamba_cache_mode not in ("none", "align"):
        refuse("mamba_cache_mode", "be 'none' or 'align'", cache.mamba_cache_mode, "A page is a whole state.")


def check_attention(attention: Any, settings: LinearAttentionConfig, name: str) -> Sizes:
    """Refuse what a replaced attention honours and a linear one cannot, and return its sizes on this rank.

    Raises:
        UnsupportedError: Naming the feature, unless the folder was converted with ``allow_approximate=True``.
    """

    def refuse(feature: str, value: object, remedy: str) -> None:
        raise UnsupportedError(
            "model", "have attention that linear attention can stand in for", value, f"{feature}: {remedy}", where=name
        )

    kind = str(getattr(attention.attn_type, "value", attention.attn_type))
    if kind != "decoder":
        refuse("It is no decoder's self-attention", kind, "Serve the model with Transformers.")
    if attention.kv_sharing_target_layer_name is not None:
        refuse("It reads keys of another layer", attention.kv_sharing_target_layer_name, "Leave it out with layers=.")
    if not settings.allow_approximate:
        for attribute, feature in ACTS_ON_SCORES.items():
            value = getattr(attention.impl, attribute, None)
            # A soft-cap of 0 is none.
            if value is not None and not (isinstance(value, (int, float)) and not value):
                remedy = "leave the layer out with layers=, or convert with allow_approximate=True to drop it."
                refuse(f"There is {feature}", attribute, remedy)
    heads, kv_heads, scale = attention.num_heads, attention.num_kv_heads, float(attention.impl.scale)
    return Sizes(attention.head_size, heads, kv_heads, scale, attention.head_size_v)
