"""The registry, settings, and what is said when they do not fit."""

import logging
import re

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig, linear_attention
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.feature_maps import (
    FeatureMap,
    available_feature_maps,
    feature_map_class,
    get_feature_map,
    load_feature_maps,
    register_feature_map,
)
from hf_linear_attn.feature_maps import base as registry
from hf_linear_attn.feature_maps.elementwise import ElementwiseMap, Elu
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State

PUBLISHED = {
    "elu", "relu", "squared_relu", "exp", "sigmoid", "softmax", "identity", "polynomial", "taylor", "rebased",
    "rff", "performer", "dpfp", "cosformer", "t2r", "hedgehog", "norm_preserving",
}  # fmt: skip


def test_the_maps_of_the_literature_are_there():
    assert set(available_feature_maps()) >= PUBLISHED


def test_elementwise_maps_run_inside_the_kernels():
    inside = {name for name in PUBLISHED if feature_map_class(name).kernel}
    assert inside == {"elu", "relu", "squared_relu", "exp", "sigmoid", "identity"}


@pytest.mark.parametrize("parent", ["elu", "hedgehog", "norm_preserving"])
def test_a_map_that_changes_its_parents_features_has_none_of_its_shortcuts(parent):
    """Kernels and loops would compute the parent's."""
    cls = feature_map_class(parent)
    method = "phi" if parent == "elu" else "features"

    def squared(self, x, *side):
        return getattr(cls, method)(self, x, *side) ** 2

    described = {"name": "mine", "formula": "phi(x)^2", "paper": "none"}
    mine = register_feature_map(type("Mine", (cls,), described | {method: squared}))
    same = type("Same", (cls,), {})
    for made, kept in ((mine, False), (same, True)):
        assert (made.kernel is not None) == (kept and cls.kernel is not None)
        assert (made(4).pair("q") is not None) == (kept and cls(4).pair("q") is not None)
        assert made.joint == (kept and cls.joint)
    text, found = [torch.randn(1, heads, 24, 8) for heads in (4, 2, 2)], []
    for backend in ("auto", "torch", "reference"):
        layer = LinearAttention(
            LinearAttentionConfig(feature_map="mine", window=5, backend=backend), Sizes(8, 4, 2, 0.3, 8), "layer"
        )
        with torch.no_grad():
            call = Call(state=State())
            found.append(torch.cat([layer(*(x[:, :, a:b] for x in text), call) for a, b in ((0, 23), (23, 24))], 2))
    for o in found[:2]:
        torch.testing.assert_close(o, found[2], rtol=1e-4, atol=1e-5)


def relu_squared(self, x):
    return torch.relu(x) ** 2


def relu_cubed(self, x):
    return torch.relu(x) ** 3


@pytest.mark.parametrize(
    ("parent", "backend"),
    # Kernels know no elementwise map of somebody's own.
    [(ElementwiseMap, "torch"), *[(x, y) for x in (FeatureMap, Elu) for y in ("torch", "triton", "reference")]],
)
def test_a_map_that_is_registered_again_computes_its_new_formula(parent, backend):
    """As where a cell of a notebook runs again."""

    def register(phi):
        own = {"name": "mine", "formula": "mine", "paper": "none", "feature_dim": property(lambda self: self.head_dim)}
        if parent is ElementwiseMap:
            own |= {"kernel": "mine", "derivative": lambda self, x, features: torch.zeros_like(x)}
        return register_feature_map(type("Mine", (parent,), own if phi is None else own | {"phi": phi}))

    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    # Elu's child first keeps the formula that kernels know.
    for phi in (None if parent is Elu else relu_squared, relu_cubed):
        register(phi)
        phi = phi or (lambda _, x: torch.nn.functional.elu(x) + 1)
        expected = linear_attention(phi(None, q), phi(None, k), v, None, return_state=False, backend="torch")
        layer = LinearAttention(
            LinearAttentionConfig(feature_map="mine", backend=backend), Sizes(8, 2, 2, 8**-0.5, 8), "layer"
        )
        for _ in range(2):
            with torch.no_grad():
                found = linear_attention(q, k, v, "mine", return_state=False, backend=backend)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(layer(q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_feature_map("elo", 4), "`feature_map` must be a registered name, got 'elo'."),
        (
            lambda: get_feature_map("elu", 4, windows=3),
            "`feature_map_options` must be settings of the map 'elu', got 'windows'. Use some of those; "
            "available: per_head, scale, separate.",
        ),
        (lambda: get_feature_map("elu", 0), "`head_dim` must be at least 1, got 0."),
        (lambda: get_feature_map("elu", 4, 4, 3), "`num_kv_heads` must divide num_heads=4, got 3."),
        (lambda: get_feature_map("elu", 4, scale=0), "`scale` must be positive and finite, got 0."),
        (lambda: get_feature_map("elu", 4, scaling=-1.0), "`scaling` must be positive and finite, got -1.0."),
        (lambda: get_feature_map("hedgehog", 4, num_features=5), "`num_features` must be a positive multiple of 2"),
        (lambda: get_feature_map("rff", 4, num_features=5), "`num_features` must be a positive multiple of 2"),
        (lambda: get_feature_map("performer", 4, separate=True), "`separate` must be False for 'performer'"),
        (lambda: get_feature_map("taylor", 4, reduced_dim=5), "`reduced_dim` must be at least 1 and at most 4"),
        (lambda: get_feature_map("dpfp", 4, nu=8), "`nu` must be at least 1 and at most 7, got 8."),
        (
            lambda: get_feature_map("polynomial", 4, constant=-1.0),
            "`constant` must be at least 0 and at most 1e+30, got -1.0.",
        ),
        (
            lambda: get_feature_map("polynomial", 4, constant=1e300),
            "`constant` must be at least 0 and at most 1e+30, got 1e+300.",
        ),
        (
            lambda: get_feature_map("polynomial", 128, power=3),
            "`power` must give at most 65536 features at head_dim=128, got 3. It would give 366145; lower it.",
        ),
        (
            lambda: get_feature_map("cosformer", 4, max_length=8).phi_q(torch.zeros(1, 1, 9, 4)),
            "`max_length` must exceed the largest position, 8, got 8.",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(call, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()


def test_maps_that_change_sign_say_so_once(caplog):
    registry._caution.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            get_feature_map("identity", 4)
    assert [r.message for r in caplog.records] == [
        "feature map 'identity': its features change sign, so the normaliser can come near 0 or change sign, "
        "and outputs can grow without bound"
    ]
    for name in PUBLISHED:
        assert bool(feature_map_class(name).caution) == (not feature_map_class(name).non_negative)


def test_only_named_feature_maps_register():
    with pytest.raises(ArgumentTypeError, match="`cls` must be a subclass of FeatureMap"):
        register_feature_map(dict)

    class NoName(FeatureMap):
        formula, paper = "x", "none"

    with pytest.raises(ArgumentError, match="`name` must be a non-empty class variable, got None"):
        register_feature_map(NoName)

    class Thief(FeatureMap):
        name, formula, paper = "elu", "x", "none"

    with pytest.raises(ArgumentError, match="`name` must not be taken, and Elu has it, got 'elu'"):
        register_feature_map(Thief)


def test_a_file_of_the_user_brings_its_maps(users_map):
    assert load_feature_maps(users_map) == load_feature_maps(str(users_map)) == ("cubed",)
    assert "cubed" in available_feature_maps()
    q = torch.full((1, 1, 2, 3), 2.0)
    assert get_feature_map("cubed", 3).phi_q(q).unique().item() == 8
    o, _ = linear_attention(q, q, q, "cubed")
    torch.testing.assert_close(o, q)


def test_a_file_that_brings_no_map_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="`file` must be a Python file"):
        load_feature_maps("nowhere.py")
    file = tmp_path / "empty.py"
    file.write_text("")
    with pytest.raises(ArgumentError, match="`file` must register a feature map"):
        load_feature_maps(file)
