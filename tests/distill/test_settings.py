import copy
import json
import pickle

import pytest

from hf_linear_attn.distill import DistillationSettings, available_presets
from hf_linear_attn.distill.cli import command_line, settings_from
from hf_linear_attn.distill.presets import CHOSEN, CONVERSION, preset
from hf_linear_attn.distill.settings import declared_settings
from hf_linear_attn.errors import ArgumentError


def parse(flags, defaults=None):
    return settings_from(command_line("distill", "", "").read(flags), defaults)


def test_the_recommended_preset_is_the_default():
    assert DistillationSettings.from_preset("recommended") == DistillationSettings()


def test_lolcats_preset_is_the_published_recipe():
    settings = DistillationSettings.from_preset("lolcats")
    assert settings.conversion_for(head_dim=128).feature_map_options == {"num_features": 128}
    assert (settings.mix, settings.window, settings.sinks) == ("shared", 64, 0)
    assert (settings.trainable, settings.lora_rank, settings.lora_alpha) == ("lora", 8, 16)
    assert (settings.distill_loss, settings.train_feature_maps, settings.window_dropout) == ("ce", False, 0)


@pytest.mark.parametrize("way", ["python", "file", "flags", "defaults"])
def test_a_preset_leaves_the_conversion_of_a_student_alone(tmp_path, way):
    path = tmp_path / "settings.yaml"
    path.write_text("preset: kept_keys\nstudent: x\nkept: 7\n")
    flags = ["--preset", "kept_keys", "--kept", "7"]
    settings = {
        "python": lambda: DistillationSettings.from_preset("kept_keys", student="x", kept=7),
        "file": lambda: DistillationSettings.from_file(path),
        "flags": lambda: parse([*flags, "--student", "x"]),
        "defaults": lambda: parse(flags, {"student": "x"}),
    }[way]()
    # What was said beside the preset stays, to be compared with the student's own.
    assert settings.given & {*CONVERSION, *CHOSEN} == {"kept"}
    assert settings.kept == 7
    assert settings.teacher_share == preset("kept_keys")["teacher_share"]


def test_every_preset_builds():
    for name in available_presets():
        DistillationSettings.from_preset(name)


def test_learning_rate_goes_as_one_over_the_width():
    settings = DistillationSettings()
    assert settings.learning_rate(4096) == pytest.approx(5e-5)
    assert settings.learning_rate(128) == pytest.approx(1.6e-3)
    assert DistillationSettings(distill_lr=0.5, lr_factor=2).learning_rate(128) == 0.5
    assert DistillationSettings(lr_factor=2).learning_rate(128) == pytest.approx(3.2e-3)


def test_maps_learn_the_slower_the_more_numbers_add_up():
    settings = DistillationSettings()
    assert settings.map_learning_rate(128) == pytest.approx(1e-2)
    assert settings.map_learning_rate(32) == pytest.approx(4e-2)
    assert DistillationSettings.from_preset("lolcats").map_learning_rate(32) == 1e-2


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_files_flags_and_python_agree(tmp_path, suffix):
    path = tmp_path / f"recipe.{suffix}"
    values = {"preset": "lolcats", "window": 32, "feature_map_options": {"num_features": 8}}
    path.write_text(json.dumps(values))
    expected = DistillationSettings.from_preset("lolcats", window=32, feature_map_options='{"num_features": 8}')
    assert DistillationSettings.from_file(path) == expected
    assert parse(["--config", str(path)]) == expected
    flags = ["--preset", "lolcats", "--window", "32", "--feature-map-options", '{"num_features": 8}']
    assert parse(flags) == expected


def test_flags_win_over_files_and_files_over_defaults(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("window: 32\nsinks: 2\n")
    settings = parse(["--config", str(path), "--sinks", "3"], {"window": 8, "model": "m"})
    assert (settings.window, settings.sinks, settings.model) == (32, 3, "m")


def test_every_setting_is_described_in_the_help():
    described = {setting.name: setting.help for setting in declared_settings()}
    assert set(described) == set(DistillationSettings().to_dict())
    assert all(described.values())
    groups = command_line("distill", "", "").groups
    assert {setting.name for settings in groups.values() for setting in settings} == {*described, "preset"}
    assert all(groups.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill_lr": 0.0}, r"`distill_lr` must be positive and finite, got 0.0. Leave it out for the default."),
        ({"distill_lr": float("inf")}, r"`distill_lr` must be positive and finite, got inf"),
        ({"map_lr": float("inf")}, r"`map_lr` must be positive and finite, got inf"),
        ({"recall_share": 1.5}, r"`recall_share` must lie in 0..1, got 1.5"),
        ({"keep_checkpoints": 1}, r"`keep_checkpoints` must be at least 2, got 1"),
        (
            {"teacher_dtype": "half"},
            r"`teacher_dtype` must be a known choice, .* available: bfloat16, float16, float32.",
        ),
        ({"trainable": "some"}, r"`trainable` must be a known choice, got 'some'. .* available: full, lora."),
        (
            {"stages": ["distill", "transfer"]},
            r"`stages` must be some of retain, transfer, distill, extend, embed, in that order",
        ),
        ({"stages": []}, r"`stages` must be some of"),
        ({"feature_map_options": "[1]"}, r"`feature_map_options` must be a JSON object, got '\[1\]'"),
        (
            {"mix": "window", "stages": ["transfer", "distill"]},
            r"`stages` must be without `transfer`: a window alone",
        ),
        ({"window": 0}, r"`window` must be at least 1 token, or None, got 0"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        DistillationSettings(**changes)


def test_unknown_presets_and_settings_are_refused(tmp_path):
    with pytest.raises(
        ArgumentError,
        match=r"`preset` must be a known preset, got 'x'.*available: elu, encoder, .*kept_keys, .*single_gpu\.",
    ):
        DistillationSettings.from_preset("x")
    path = tmp_path / "recipe.yaml"
    path.write_text("windw: 3")
    with pytest.raises(
        ArgumentError, match=r"`config` must hold known settings only, got 'windw'. Did you mean window"
    ):
        DistillationSettings.from_file(path)


def test_what_was_given_is_told_from_defaults(tmp_path):
    assert DistillationSettings().given == frozenset()
    settings = DistillationSettings(window=64).with_changes(sinks=4)
    assert settings == DistillationSettings()
    assert settings.given == copy.deepcopy(settings).given == {"window", "sinks"}
    assert pickle.loads(pickle.dumps(settings)).given == {"window", "sinks"}
    assert DistillationSettings.from_preset("finetune", rows=2).given == {*preset("finetune"), "rows"}
    path = tmp_path / "recipe.yaml"
    path.write_text("window: 64\ndistill_lr: 1e-3\n")
    parsed = parse(["--config", str(path), "--sinks", "4", "--no-pack"], {"model": "m"})
    assert parsed.given == {"window", "distill_lr", "sinks", "pack", "model"}
    assert parsed == DistillationSettings(distill_lr=1e-3, pack=False, model="m")


def test_a_window_alone_has_nothing_to_transfer():
    alone = DistillationSettings(mix="window")
    assert alone.stages == ["distill"]
    assert alone.with_changes(mix="key").stages == ["transfer", "distill"]
    assert DistillationSettings(**alone.to_dict()) == alone
