import importlib.util
import json
import re
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_linear_attn import available_feature_maps, patch_model
from hf_linear_attn.cli import main
from hf_linear_attn.diagnostics import ApproximationSettings, inspect_model
from hf_linear_attn.errors import ArgumentError

TEXT = "The cat sat on the mat, and the dog sat on the cat. " * 3
FAST = ApproximationSettings(queries=16, matrix_tokens=16, ranked_queries=2)


@pytest.fixture
def saved(llama, tokenizer, tmp_path):
    folder = tmp_path / "model"
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def flags(saved, tmp_path):
    """Return what every inspection by command is told besides its model."""
    return ["--text-file", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "out")]


def test_the_report_shows_every_map_and_needs_nothing_else(llama, tokenizer, tmp_path):
    results = inspect_model(llama, tokenizer, TEXT, tmp_path, max_tokens=40, settings=FAST)
    assert set(results["summary"]["maps"]) == set(available_feature_maps())
    assert len(results["layers"]) == 2
    assert json.loads((tmp_path / "inspection.json").read_text()) == results
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"https?://|<script|<link", page)
    assert page.count('src="data:image/png;base64,') == page.count("<img") == 4
    table = (tmp_path / "table.md").read_text()
    for name in available_feature_maps():
        assert f"<td>{name}</td>" in page
        assert f"| {name} |" in table
    errors = [means["output_error"] for means in results["summary"]["maps"].values()]
    assert errors == sorted(errors)


def test_options_of_maps_are_used(llama, tokenizer):
    maps = {"performer": {"num_features": 32}, "taylor": {"reduced_dim": 4}}
    results = inspect_model(llama, tokenizer, TEXT, maps=maps, max_tokens=20, settings=FAST)
    assert results["summary"]["maps"]["performer"]["feature_dim"] == 32
    assert results["summary"]["maps"]["taylor"]["feature_dim"] == 15


def test_a_patched_model_shows_its_branches(llama, tokenizer, tmp_path):
    patch_model(llama, window=8, sinks=2)
    llama.train()
    results = inspect_model(llama, tokenizer, TEXT, tmp_path, max_tokens=40)
    assert llama.training
    assert set(results["branches"]["loss_nats_without"]) == {"window", "sinks", "linear"}
    page = (tmp_path / "report.html").read_text()
    assert "Share of each branch" in page
    assert f"{results['branches']['loss_nats']:.3f}" in page


def test_a_model_that_keeps_keys_shows_which(llama, tokenizer, tmp_path):
    results = inspect_model(patch_model(llama, window=4, sinks=1, kept=3, mix="window"), tokenizer, TEXT, tmp_path)
    kept, layers = results["kept"], results["branches"]["kept_at"]
    heads = [head for layer in layers.values() for head in layer]
    assert sum(kept["by_depth"]) == pytest.approx(1)
    first = kept["tokens"][0]
    assert first["heads"] == sum(first["position"] in head for head in heads) / len(heads)
    assert first["token"] == tokenizer.decode(tokenizer(TEXT).input_ids[first["position"]])
    page = (tmp_path / "report.html").read_text()
    assert "Where the keys stand that are kept at the end" in page
    assert "0% to 10%" in page


def test_the_command_inspects_softmax_and_patched_models(saved, flags, llama, tokenizer, tmp_path, capsys):
    flags += ["--max-tokens", "30"]
    main(["inspect", str(saved), *flags, "--maps", "elu", "hedgehog"])
    assert "| hedgehog |" in capsys.readouterr().out
    patch_model(llama, window=8).save_pretrained(tmp_path / "patched")
    tokenizer.save_pretrained(tmp_path / "patched")
    main(["inspect", str(tmp_path / "patched"), *flags, "--overwrite"])
    assert "| linear |" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").is_file()


def test_the_command_finds_a_map_in_a_file_of_the_user(saved, flags, capsys, users_map):
    main(["inspect", str(saved), *flags, "--max-tokens", "20", "--feature-map-file", str(users_map)])
    assert "| cubed |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--maps", "elo"], "`maps` must be registered names, got 'elo'"),
        (["--text-file", "nowhere.txt"], "`text_file` must be a readable UTF-8 text, got 'nowhere.txt'"),
        (["--dtype", "int8"], "`dtype` must be a floating dtype of torch, got 'int8'"),
        (["--max-tokens", "1"], "`max_tokens` must be at least 2, got 1"),
        (["--feature-map-file", "no.py"], "`feature_map_file` must be a Python file, got 'no.py'"),
    ],
)
def test_the_command_names_what_does_not_fit(saved, flags, tmp_path, capsys, change, message):
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", str(saved), *flags, *change])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_arguments_that_do_not_fit_are_named(llama, tokenizer):
    with pytest.raises(ArgumentError, match="`maps` must be a list of names, got 'elu'"):
        inspect_model(llama, tokenizer, TEXT, maps="elu")
    with pytest.raises(ArgumentError, match="`maps` must name at least one map"):
        inspect_model(llama, tokenizer, TEXT, maps=[])
    with pytest.raises(ArgumentError, match="`text` must have at least 2 tokens, got 'a'"):
        inspect_model(llama, tokenizer, "a")
    with pytest.raises(ArgumentError, match="`maps` must be None for a patched model"):
        inspect_model(patch_model(llama), tokenizer, TEXT, maps=["elu"])


def test_a_model_of_nan_is_named_with_its_layer(llama, tokenizer):
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ArgumentError, match=r"`model` must compute finite numbers, .*\(model\.layers\.1\.self_attn\)"):
        inspect_model(llama, tokenizer, TEXT, maps=["elu"], max_tokens=16)
    with pytest.raises(ArgumentError, match=r"`model` must compute finite numbers, .*\(LlamaForCausalLM\)"):
        inspect_model(patch_model(llama), tokenizer, TEXT, max_tokens=16)


def test_without_matplotlib_the_tables_are_written_all_the_same(saved, flags, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(["inspect", str(saved), *flags, "--max-tokens", "30", "--maps", "elu,hedgehog"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>hedgehog</td>" in page
    assert "<img" not in page
    assert "| hedgehog |" in (tmp_path / "out" / "table.md").read_text()
    assert "pip install 'hf_linear_attn[report]'" in capsys.readouterr().err


def test_what_lies_beyond_the_models_positions_is_named_or_left_out(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=40)).eval()
    assert inspect_model(model, tokenizer, TEXT, maps=["elu"], settings=FAST)["tokens"] == 40
    with pytest.raises(ArgumentError, match=r"`max_tokens` must be at most 40, .*got 41 \(GPT2LMHeadModel\)"):
        inspect_model(model, tokenizer, TEXT, maps=["elu"], max_tokens=41, settings=FAST)
    assert inspect_model(model, tokenizer, "A cat", maps=["elu"], max_tokens=41, settings=FAST)["tokens"] == 5
