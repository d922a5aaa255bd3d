"""Settings survive JSON, and are checked once."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.config import FORMAT_VERSION
from hf_linear_attn.errors import CheckpointError

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
    assert set(LinearAttentionConfig().to_dict()) == names


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, "1", None])
def test_other_versions_are_refused(version):
    values = LinearAttentionConfig().to_dict() | {"format_version": version}
    with pytest.raises(CheckpointError, match=r"`format_version` must be at most 1, got .*\. Update hf_linear_attn"):
        LinearAttentionConfig.from_dict(values)
