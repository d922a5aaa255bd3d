"""The softmax model that a converted one was made from, with the converted one's own weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.patching.convert import unpatch_model
from hf_linear_attn.patching.hook_tables import HOOKS, hook_tables
from hf_linear_attn.patching.scope import is_patched


@contextmanager
def softmax(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Turn a converted model back into its softmax teacher within a ``with`` block, with the weights that it has.

    Attention, masks and caches are those of the model's class, and adapters are off: of a student whose base was not
    trained, as the preset ``single_gpu`` leaves it, every result equals the teacher's to the bit. Nothing is copied.
    Threads that share the model share the change; :func:`teacher_of` makes a model beside it instead.

    Args:
        model: A patched model, or PEFT's wrapper of one.

    Yields:
        The model itself, of a wrapper the model in it.

    Raises:
        ArgumentTypeError: If there is no Transformers model.
        ArgumentError: If it is not patched, or adapters are merged into its weights.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linear_attn import patch_model
        >>> sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
        >>> teacher = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        >>> ids = torch.arange(8)[None]
        >>> expected = teacher(ids).logits
        >>> student = patch_model(teacher, feature_map="elu")
        >>> with softmax(student) as teacher:
        ...     torch.equal(teacher(ids).logits, expected)
        True
    """
    base = _converted(model)
    held = _Patch(base)
    unpatch_model(base)
    try:
        with adapters_off(base):
            yield base
    finally:
        held.put_back()


def teacher_of(model: nn.Module) -> PreTrainedModel:
    """Return a converted model's softmax teacher as a model of its own, which shares all weights with it.

    It takes no memory but that of its modules, and follows every change of the weights. So one set of weights drafts
    and verifies: ``teacher_of(student).generate(ids, assistant_model=student)`` answers as the teacher does, and
    ``student.generation_config`` says how much is drafted. What :func:`softmax` says of weights holds here too: of a
    student whose base was trained, or whose adapters are merged, this is not the model that it was made from. Move the
    student before, for buffers are not moved along.

    Args:
        model: A patched model, or PEFT's wrapper of one.

    Raises:
        ArgumentTypeError: If there is no Transformers model.
        ArgumentError: If it is not patched, or adapters are merged into its weights.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linear_attn import patch_model
        >>> sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
        >>> student = patch_model(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), feature_map="elu")
        >>> teacher = teacher_of(student)
        >>> teacher.lm_head.weight is student.lm_head.weight
        True
    """
    base = _converted(model)
    shared = {id(x): x for tensors in (base.parameters(), base.buffers()) for x in tensors}
    teacher = unpatch_model(copy.deepcopy(base, shared))
    for module in _adapted(teacher):
        module._disable_adapters = True
    return teacher


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch PEFT's adapters off within a ``with`` block, and leave which of them learn as it is."""
    before = [(module, module._disable_adapters) for module in _adapted(model)]
    # By their method, adapters that were frozen would learn again afterwards.
    for module, _ in before:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, off in before:
            module._disable_adapters = off


def _adapted(model: nn.Module) -> list[Any]:
    """List the modules of PEFT's in a model, which need not be installed."""
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


def _converted(model: nn.Module) -> PreTrainedModel:
    """Return the patched model in a model, if its weights are apart from what was learned beside them."""
    wrapper: Any = model
    base = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
    if not isinstance(base, PreTrainedModel):
        remedy = "Pass what patch_model or from_pretrained returned, or PEFT's wrapper of it."
        raise ArgumentTypeError("model", "be a patched Transformers model", type(model).__name__, remedy)
    if not is_patched(base):
        remedy = "A softmax model is its own teacher; pass what patch_model or from_pretrained returned."
        raise ArgumentError("model", "have a converted layer", type(base).__name__, remedy)
    merged = next((name for name, module in base.named_modules() if getattr(module, "merged", False) is True), None)
    if merged is not None:
        remedy = "Load the model and its adapter again: weights that were merged once are not the same to the bit."
        raise ArgumentError("model", "have adapters that are not merged", "merged ones", remedy, where=merged)
    return base


class _Patch:
    """What :func:`unpatch_model` takes out of a patched model, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: list[tuple[nn.Module, Any, Any, PreTrainedConfig, str | None]] = []
        self.hooks: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = []
        self.models: list[tuple[PreTrainedModel, type[PreTrainedModel], dict[str, Any]]] = []
        for module in model.modules():
            held: Any = module._modules.get("linear_attention")
            part = getattr(held, "original_module", held)
            if part is not None and part.host is not None:
                host = part.host.config
                self.parts.append((module, held, module.config, host, host._attn_implementation_internal))
            self.hooks += [(*tables, dict(tables[0])) for tables in hook_tables(module) if HOOKS in tables[0]]
            if isinstance(module, PreTrainedModel):
                noted = vars(module.config)
                own: dict[str, Any] = {name: noted[name] for name in ("linear_attention", "auto_map") if name in noted}
                self.models.append((module, type(module), own))

    def put_back(self) -> None:
        """Make the model what it was."""
        for module, held, config, host, implementation in self.parts:
            module.linear_attention, module.config = held, config
            host._attn_implementation_internal = implementation
        for table, marks, before in self.hooks:
            later = {key: hook for key, hook in table.items() if key not in before}
            # Others' hooks may have gone meanwhile.
            kept = {key: hook for key, hook in before.items() if key in table or key == HOOKS}
            table.clear()
            table.update({**kept, **later})
            marks[HOOKS] = True
        for model, cls, own in self.models:
            model.__class__ = cls  # type: ignore[assignment]
            vars(model.config).update(own)
