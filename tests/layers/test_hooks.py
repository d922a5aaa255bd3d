"""Whoever hooks a feature map sees every token, also where kernels or loops would compute its features."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State

H, HKV, D = 4, 2, 8
LAYERS = {
    "recommended": {"feature_map": "norm_preserving", "window": 4, "sinks": 2},
    "hedgehog": {"feature_map": "hedgehog", "window": 4},
    "elu": {"feature_map": "elu"},
    "elu and window": {"feature_map": "elu", "window": 4, "mix": "gate"},
    "delta": {"feature_map": "elu", "update_rule": "delta"},
}
PROMPT, STEPS = 12, 3


def build(backend, **settings):
    return LinearAttention(LinearAttentionConfig(backend=backend, **settings), Sizes(D, H, HKV, D**-0.5, D), "layer")


@torch.no_grad()
def outputs(layer):
    generator, state = torch.Generator().manual_seed(0), State()
    found = []
    for tokens in (PROMPT, *[1] * STEPS):
        qkv = (torch.randn(1, heads, tokens, D, generator=generator) for heads in (H, HKV, HKV))
        found.append(layer(*qkv, Call(state=state)))
    return torch.cat(found, 2)


def on_map(layer, hook):
    """Hook a layer's map."""
    return layer.feature_map.register_forward_hook(hook)


def on_all(layer, hook):
    """Hook all modules, as profilers do."""
    return register_module_forward_hook(lambda x, *given: hook(x, *given) if x is layer.feature_map else None)


def before_all(layer, hook):
    """Hook all modules before their calls."""
    return register_module_forward_pre_hook(lambda x, given: hook(x, given, None) if x is layer.feature_map else None)


@pytest.mark.parametrize("register", [on_map, on_all, before_all])
@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_hooks_on_a_map_are_called(settings, backend, register):
    layer = build(backend, **settings)
    expected, seen = outputs(layer), []
    hook = register(layer, lambda _, given, features: seen.append((given, features)))
    try:
        torch.testing.assert_close(outputs(layer), expected, rtol=1e-4, atol=1e-4)
    finally:
        hook.remove()
    # A step's queries and key can come together.
    asked = sum(given[0].numel() for given, _ in seen if given[1] == "q")
    # What has not left the window has no features yet; no query reads the linear branch before something has.
    assert asked >= H * D * (PROMPT + STEPS)
    count = len(seen)
    torch.testing.assert_close(outputs(layer), expected)
    assert len(seen) == count


@pytest.mark.parametrize("register", [on_map, on_all])
@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_what_a_hook_returns_counts(settings, backend, register):
    layer = build(backend, **settings)
    expected = outputs(layer)
    hook = register(layer, lambda _, given, features: features.flip(-1) if given[1] == "k" else None)
    try:
        assert (outputs(layer) - expected).abs().max() > 1e-3
    finally:
        hook.remove()


@pytest.mark.parametrize("register", [on_map, before_all])
def test_a_hook_that_comes_between_two_steps_is_called(register):
    layer = build("numba", **LAYERS["recommended"])
    generator, state, seen, hooks = torch.Generator().manual_seed(0), State(), [], []
    for tokens in (PROMPT, 1, 1, 1):
        if tokens == 1 and state.ready is not None:
            hooks.append(register(layer, lambda *_: seen.append(1)))
        with torch.no_grad():
            qkv = (torch.randn(1, heads, tokens, D, generator=generator) for heads in (H, HKV, HKV))
            layer(*qkv, Call(state=state))
    for hook in hooks:
        hook.remove()
    assert seen
