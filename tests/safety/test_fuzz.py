"""Whatever is passed in, what comes out is an answer or an error of this package, and soon.

A few hundred cases each run; 10,000 with `pytest -m optional tests/safety/test_fuzz.py`.
"""

import json
import math
import time
from contextlib import suppress

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_linear_attn import (
    LinearAttentionConfig,
    LinearAttentionState,
    available_feature_maps,
    linear_attention,
    patch_model,
    unpatch_model,
)
from hf_linear_attn.cli import COMMANDS, main
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.errors import HFLinearAttnError
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.feature_maps import feature_map_class
from hf_linear_attn.feature_maps.base import map_options
from hf_linear_attn.patching import is_patched
from tests.distill.tiny import tiny_teacher

SECONDS = 5
"""Processor time that a case may take."""

CASES = [pytest.param(100, id="quick"), pytest.param(2000, id="full", marks=pytest.mark.optional)]

NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30, -(10**30), 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-6, 1e-45, 1e-320, 1e308, math.nan, math.inf, -math.inf]),
    st.booleans(),
)
WORDS = st.one_of(
    st.sampled_from(
        ["", "none", "all", "auto", "elu", "hedgehog", "torch", "reference", "key", "window", "shared", "1e-3"]
    ),
    st.text(max_size=8),
)
PLAIN = st.one_of(st.none(), NUMBERS, WORDS)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
THINGS = st.one_of(
    VALUES,
    st.sampled_from([torch.ones(2), torch.ones(2, dtype=torch.bool), torch.tensor(3), object(), b"x", (1,), {3}, 1j]),
)


def fuzz(strategy, count, case):
    """Run a case on values of a strategy; only this package's errors, and no long silence, are let pass."""

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(value):
        start = time.process_time()
        with suppress(HFLinearAttnError):
            case(value)
        assert time.process_time() - start < SECONDS

    run()


@st.composite
def attention_calls(draw):
    """Draw the arguments of a call that is right but for at most two of them."""
    batch, groups, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    tokens, head, value = draw(st.integers(1, 70)), draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([1, 4]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    torch.manual_seed(draw(st.integers(0, 9)))
    phi = draw(st.sampled_from(available_feature_maps()))
    features = feature_map_class(phi)(head, groups * kv_heads, kv_heads).feature_dim
    call = {
        "q": torch.randn(batch, groups * kv_heads, tokens, head).to(dtype),
        "k": torch.randn(batch, kv_heads, tokens, head).to(dtype),
        "v": torch.randn(batch, kv_heads, tokens, value).to(dtype),
        "feature_map": phi,
        "causal": draw(st.booleans()),
        "key_mask": draw(st.sampled_from([None, torch.rand(batch, tokens) > 0.3])),
        "backend": draw(st.sampled_from(["auto", "torch", "reference"])),
        "eps": draw(st.sampled_from([1e-6, 1e-3, 1e-30])),
        "positions": draw(st.sampled_from([None, torch.arange(tokens).expand(batch, -1)])),
    }
    if call["causal"]:
        call["delay"] = draw(st.integers(0, tokens + 2))
    if batch == 1 and draw(st.booleans()):
        cut = draw(st.integers(0, tokens))
        call["cu_seqlens"] = torch.tensor([0, cut, tokens])
    if draw(st.booleans()):
        rows = 2 if "cu_seqlens" in call else batch
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        kv, z = (
            torch.rand(rows, kv_heads, features, value, dtype=wide),
            torch.rand(rows, kv_heads, features, dtype=wide),
        )
        call["state"] = LinearAttentionState(kv, z)
    for name in draw(st.lists(st.sampled_from([*call, "delay", "cu_seqlens", "state", "return_state"]), max_size=2)):
        call[name] = draw(THINGS | tensors())
    return call


def tensors():
    """Draw tensors of odd shapes, dtypes and devices."""
    shapes = st.lists(st.sampled_from([0, 1, 2, 4]), max_size=5)
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.int32, torch.bool, torch.complex64, torch.float16])
    return st.builds(
        lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
        shapes,
        dtypes,
        st.sampled_from(["cpu", "cpu", "cpu", "meta"]),
    )


def attend(call):
    call = dict(call)
    q, k, v = (call.pop(name) for name in ("q", "k", "v"))
    found = linear_attention(q, k, v, **call)
    o = found if isinstance(found, torch.Tensor) else found[0]
    assert o.shape == (*q.shape[:3], v.shape[3])
    assert o.dtype == q.dtype
    phi = call["feature_map"]
    normal = all(x.isfinite().all() for x in (q, k, v) if x.device.type == "cpu")
    # Half precision may run out of numbers, and a normaliser that changes sign may come near 0.
    if normal and q.dtype in (torch.float32, torch.float64) and isinstance(phi, str) and q.device.type == "cpu":
        assert o.isfinite().all() or not feature_map_class(phi)(q.shape[3]).non_negative


@pytest.mark.parametrize("count", CASES)
def test_linear_attention(count):
    fuzz(attention_calls(), count, attend)


@st.composite
def conversions(draw):
    """Draw arguments of `patch_model`: right ones, of which up to two are replaced."""
    phi = draw(st.sampled_from(available_feature_maps()))
    window = draw(st.sampled_from([None, 1, 3, 8]))
    options = {}
    for name in draw(st.lists(st.sampled_from(sorted(map_options(feature_map_class(phi)))), max_size=2)):
        options[name] = draw(PLAIN)
    arguments = {
        "feature_map": phi,
        "feature_map_options": options,
        "window": window,
        "sinks": 0 if window is None else draw(st.integers(0, 3)),
        "mix": draw(st.sampled_from(["key", "gate", "shared", "window"])) if window else "key",
        "layers": draw(st.sampled_from([None, "all", [0], [1], [0, 1]])),
        "eps": draw(st.sampled_from([1e-6, 1e-2])),
        "backend": draw(st.sampled_from(["auto", "torch", "reference"])),
    }
    for name in draw(st.lists(st.sampled_from([*arguments, "allow_approximate", "update_rule"]), max_size=2)):
        arguments[name] = draw(THINGS)
    return arguments


@pytest.mark.parametrize("count", CASES)
def test_patch_model(count):
    softmax = tiny_teacher()
    ids, names = torch.arange(3, 17)[None], list(softmax.state_dict())
    expected = softmax(ids).logits

    def case(arguments):
        try:
            model = patch_model(softmax, **arguments)
            with torch.no_grad():
                logits = model(ids, use_cache=True).logits
                model.generate(ids[:, :5], max_new_tokens=2, do_sample=False)
            assert logits.shape == expected.shape
            assert LinearAttentionConfig.from_dict(json.loads(json.dumps(model.config.linear_attention)))
        finally:
            if is_patched(softmax):
                unpatch_model(softmax)
            # Refused or not, the model is what it was.
            assert list(softmax.state_dict()) == names
        assert torch.equal(softmax(ids).logits, expected)

    fuzz(conversions(), count, case)


@pytest.mark.parametrize("count", CASES)
def test_settings_of_a_saved_model(count):
    names = st.sampled_from([*LinearAttentionConfig().to_dict(), "update_rule"]) | WORDS

    def case(values):
        whole = LinearAttentionConfig().to_dict() | values if isinstance(values, dict) else values
        config = LinearAttentionConfig.from_dict(whole)
        assert LinearAttentionConfig.from_json(config.to_json()) == config

    fuzz(st.dictionaries(names, VALUES, max_size=4) | VALUES, count, case)
    fuzz(st.text(max_size=40) | VALUES.map(lambda x: json.dumps(x)), count // 4, LinearAttentionConfig.from_json)


NAMES = {
    "distill": sorted(DistillationSettings().to_dict()),
    "evaluate": sorted(EvaluationSettings.__dataclass_fields__),
}
NOWHERE = {"model": "/nowhere/model", "teacher": "/nowhere/teacher"}
NOTHING = {"distill": NOWHERE | {"student": None, "teacher_logits": None}, "evaluate": NOWHERE}
"""So that nothing begins to run: fuzz is of the words, not of the work."""


def ends(arguments):
    """Run a command; it must end with a status, and never with a traceback."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code in (0, 1, 2)


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("command", NAMES)
def test_files_of_settings(count, command, tmp_path, capsys):
    path = tmp_path / "settings.yaml"

    def case(values):
        text = values if isinstance(values, str) else yaml.safe_dump(values | NOTHING[command])
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        ends([command, "--config", str(path), "--output-dir", str(tmp_path / "out"), "--no-progress"])

    names = st.sampled_from(NAMES[command]) | WORDS
    fuzz(st.dictionaries(names, VALUES, max_size=4) | st.text(max_size=60), count // 2, case)
    capsys.readouterr()


@pytest.mark.parametrize("count", CASES)
def test_command_lines(count, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = sorted({*NAMES["distill"], *NAMES["evaluate"], "config", "preset", "tokens", "gpus", "maps", "max_tokens"})
    flags = st.sampled_from(names).map(lambda name: "--" + name.replace("_", "-")) | st.sampled_from(names).map(
        "--{}".format
    )
    words = st.one_of(flags, flags, WORDS, NUMBERS.map(lambda x: f"{x:g}" if isinstance(x, float) else str(x)[:40]))

    def case(line):
        command, *rest = line
        # The model is named last: nothing is there to work on.
        model = ["--model", "/nowhere/model"] if command in NAMES else []
        with suppress(HFLinearAttnError):
            if command == "maps" and not rest:
                main([command])
            else:
                ends([command, *rest, *model])

    commands = st.sampled_from(sorted(set(COMMANDS) - {"check"})) | WORDS
    fuzz(st.tuples(commands, st.lists(words, max_size=6)).map(lambda x: [x[0], *x[1]]), count, case)
    capsys.readouterr()
