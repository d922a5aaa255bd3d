"""Settings survive JSON, and are checked once."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.config import FORMAT_VERSION, LATER
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, CheckpointError

windows = st.none() | st.integers(1, 4096)


@st.composite
def configs(draw):
    window = draw(windows)
    return LinearAttentionConfig(
        feature_map=draw(st.sampled_from(["elu", "hedgehog"])),
        feature_map_options=draw(st.dictionaries(st.text(min_size=1, max_size=5), st.integers() | st.booleans())),
        layers=draw(st.none() | st.lists(st.integers(0, 99), max_size=5).map(tuple)),
        window=window,
        sinks=0 if window is None else draw(st.integers(0, 8)),
        per_layer={}
        if window is None
        else draw(st.dictionaries(st.integers(0, 9), st.just({"window": 3}), max_size=2)),
        mix="gate" if window is None else draw(st.sampled_from(["gate", "shared", "window"])),
        eps=draw(st.floats(1e-12, 1)),
    )


@settings(max_examples=30, deadline=None)
@given(configs())
def test_json_round_trip(config):
    assert LinearAttentionConfig.from_json(config.to_json()) == config
    assert LinearAttentionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LinearAttentionConfig().window = 3


def test_json_holds_every_setting():
    names = {field.name for field in dataclasses.fields(LinearAttentionConfig)}
    assert set(LinearAttentionConfig().to_dict()) == names - set(LATER)


def test_a_file_from_before_there_was_a_choice_means_what_it_did():
    old = LinearAttentionConfig(window=8, kept=2, retention="learned").to_dict()
    assert "retention_units" not in old
    assert LinearAttentionConfig.from_dict(old).retention_units == 64
    assert LinearAttentionConfig.from_dict(old | {"retention_units": 16}).to_dict()["retention_units"] == 16


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, -1, "1", None])
def test_other_versions_are_refused(version):
    values = LinearAttentionConfig().to_dict() | {"format_version": version}
    with pytest.raises(CheckpointError, match=r"`format_version` must be at most 1, got .*\. Update hf_linear_attn"):
        LinearAttentionConfig.from_dict(values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": "64"}, r"`window` must be a whole number or None, got '64'"),
        ({"window": 16.0}, r"`window` must be a whole number or None, got 16\.0"),
        ({"window": True}, r"`window` must be a whole number or None, got True"),
        ({"window": 8, "sinks": None}, r"`sinks` must be a whole number, got None"),
        ({"eps": "1e-6"}, r"`eps` must be a number, got '1e-6'"),
        ({"eps": True}, r"`eps` must be a number, got True"),
        ({"eps": float("nan")}, r"`eps` must be a number, got nan"),
        ({"eps": 10**400}, r"`eps` must be a number, got 1000"),
        ({"feature_map": 3}, r"`feature_map` must be a text, got 3"),
        ({"feature_map_options": [1]}, r"`feature_map_options` must be a mapping of names to values, got \[1\]"),
        ({"feature_map_options": {1: 2}}, r"`feature_map_options` must be a mapping of names to values"),
        ({"per_layer": [3]}, r"`per_layer` must be a mapping of names to values, got \[3\]"),
        ({"window": 8, "per_layer": {1: {"window": 2.5}}}, r"`per_layer\[1\].window` must be a whole number, got 2.5"),
        ({"layers": "all"}, r"`layers` must be a list of whole numbers or None, got 'all'"),
        ({"layers": [0, 1.0]}, r"`layers` must be a list of whole numbers or None"),
        ({"mix": ["key"]}, r"`mix` must be a text, got \['key'\]"),
        ({"backend": None}, r"`backend` must be a text, got None"),
        ({"allow_approximate": "yes"}, r"`allow_approximate` must be True or False, got 'yes'"),
        ({"trained_length": 4.0}, r"`trained_length` must be a whole number or None, got 4\.0"),
        ({"format_version": True}, r"`format_version` must be a whole number, got True"),
    ],
    ids=str,
)
def test_types_are_checked_in_code_and_in_files(settings, message):
    with pytest.raises(ArgumentTypeError, match=message):
        LinearAttentionConfig(**settings)
    with pytest.raises(CheckpointError, match=message):
        LinearAttentionConfig.from_dict(LinearAttentionConfig().to_dict() | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": float("inf")}, r"`eps` must lie in 1e-37\.\.1e\+37, got inf"),
        # Adding it in float32 would add nothing, and a query that sees no key would be NaN.
        ({"eps": 1e-50}, r"`eps` must lie in 1e-37\.\.1e\+37, got 1e-50"),
        ({"window": 10**30}, r"`window` must be a number below 2\*\*62"),
        ({"window": 10**9}, r"`window` must be at most 1048576 tokens"),
        ({"window": 8, "sinks": 2**40}, r"`sinks` must be at most 1048576 tokens"),
        ({"backend": "tritn"}, r"`backend` must be a known backend, got 'tritn'.*available: auto, .*reference, torch"),
        ({"rotary": "drop"}, r"`rotary` must be a known choice, got 'drop'.*: auto, keep, undo"),
        ({"trained_length": 0}, r"`trained_length` must be at least 1 token"),
        ({"window": 8, "per_layer": {"first": {"window": 2}}}, r"`per_layer` must hold indices of layers, got 'first'"),
        # As JSON it would be no text that others read, and it is not even itself.
        ({"feature_map_options": {"a": float("nan")}}, r"`feature_map_options` must be what JSON can say, got .*nan"),
        ({"feature_map_options": {"a": {1}}}, r"`feature_map_options` must be what JSON can say, got"),
        ({"retention_units": 0}, r"`retention_units` must be 1 to 4096, got 0"),
        ({"retention_units": 4097}, r"`retention_units` must be 1 to 4096, got 4097"),
        ({"window": 8, "per_layer": {1: {"sinks": 2}}}, r"`per_layer` must hold some of window and kept for layer 1"),
        ({"window": 8, "per_layer": {1: 4}}, r"`per_layer` must hold some of window and kept for layer 1, got 4"),
        (
            {"window": 8, "per_layer": {1: {"window": 0}}},
            r"`per_layer` must hold what layer 1 can have, got .*`window`",
        ),
        ({"per_layer": {1: {"window": 4}}}, r"`per_layer` must hold no `window` where the model has none, got"),
        (
            {"window": 8, "per_layer": {1: {"kept": 4}}},
            r"`per_layer` must hold no `kept` where the model has none, got",
        ),
    ],
    ids=str,
)
def test_ranges_are_checked_in_code_and_in_files(settings, message):
    with pytest.raises(ArgumentError, match=message):
        LinearAttentionConfig(**settings)
    with pytest.raises(CheckpointError, match=message):
        LinearAttentionConfig.from_dict(LinearAttentionConfig().to_dict() | settings)


def test_whole_numbers_stand_for_numbers():
    config = LinearAttentionConfig(eps=1, layers=[0, 2])
    assert (type(config.eps), config.layers) == (float, (0, 2))


@pytest.mark.parametrize("values", [None, [], "elu", 3])
def test_settings_that_are_no_mapping_are_refused(values):
    with pytest.raises(CheckpointError, match=r"`linear_attention` must be a mapping of settings"):
        LinearAttentionConfig.from_dict(values)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"eps": 1e999}', '{"window": 1' + "0" * 5000 + "}"])
def test_texts_that_hold_no_settings_are_refused(text):
    with pytest.raises(CheckpointError):
        LinearAttentionConfig.from_json(text)


@pytest.mark.parametrize("name", LinearAttentionConfig().to_dict())
def test_settings_that_a_file_lacks_are_not_made_up(name):
    values = LinearAttentionConfig(feature_map="relu", update_rule="delta").to_dict()
    del values[name]
    with pytest.raises(CheckpointError, match=rf"`linear_attention` must hold every setting .*got 'none of .*{name}'"):
        LinearAttentionConfig.from_dict(values)
