"""What vLLM is told of converted models; attributes of this module are their classes, made when vLLM asks for one."""

from typing import Any

import vllm
from vllm import ModelRegistry
from vllm.logger import init_logger

from hf_linear_attn.patching.saving import PREFIX
from hf_linear_attn.serving.vllm.checks import (
    SUPPORTED_VERSIONS,
    check_serving,
    check_version,
    is_supported,
    settings_of,
)
from hf_linear_attn.serving.vllm.engine import BACKEND, OPERATION
from hf_linear_attn.serving.vllm.layer_types import mark_converted

logger = init_logger("vllm.hf_linear_attn")


def register_architectures() -> None:
    """Register every architecture that vLLM knows, with converted layers."""
    names = [name for name in ModelRegistry.get_supported_archs() if not name.startswith(PREFIX)]
    for name in names:
        ModelRegistry.register_model(PREFIX + name, f"{__name__}:{PREFIX}{name}")
    if not is_supported(vllm.__version__):
        known = ", ".join(SUPPORTED_VERSIONS)
        logger.warning("hf_linear_attn serves converted models with vLLM %s only: not with %s", known, vllm.__version__)
        return
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    for name in names:
        MODELS_CONFIG_MAP[PREFIX + name] = _hook(MODELS_CONFIG_MAP.get(name, VerifyAndUpdateConfig))
    # Every process is handed layers' descriptions, which name it.
    if BACKEND not in MambaAttentionBackendEnum.__members__:
        MambaAttentionBackendEnum.register(BACKEND, "hf_linear_attn.serving.vllm.engine.layer.Backend")
    # Graphs are compiled between attention calls.
    if OPERATION not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(OPERATION)


def _hook(base: Any) -> Any:
    """Return a class that checks configurations of converted models, after what vLLM does of their softmax kin."""

    class Hook(base):  # type: ignore[misc]
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            base.verify_and_update_model_config(model_config)
            config = model_config.hf_config
            mark_converted(config, settings_of(config, str(model_config.model)).layers or ())

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            base.verify_and_update_config(vllm_config)
            check_serving(vllm_config)

    return Hook


def __getattr__(name: str) -> Any:
    if not name.startswith(PREFIX):
        raise AttributeError(name)
    check_version(vllm.__version__)
    from hf_linear_attn.serving.vllm.engine.models import convert

    base = ModelRegistry.models[name.removeprefix(PREFIX)].load_model_cls()
    globals()[name] = cls = convert(base, name)
    return cls
