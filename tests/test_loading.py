import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, GPT2Config, GPTJConfig, LlamaConfig, OPTConfig

from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.loading import load_config, load_model, load_tokenizer, position_limit
from tests.evaluation.helpers import tiny_linear, tiny_llama


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=96), 96),
        # Two more rows than positions.
        (OPTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=96), 96),
        # A rotation that is looked up.
        (GPTJConfig(n_embd=8, n_layer=1, n_head=2, rotary_dim=4, n_positions=96), 96),
        (LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=96), None),
        # The tower for images has 196 positions.
        (Gemma3Config(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_positions_run_out_where_the_language_model_looks_them_up(config, limit):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert position_limit(model) == limit


def test_models_are_loaded_as_they_were_saved(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "softmax")
    tiny_linear().save_pretrained(tmp_path / "linear")
    for attention in ("softmax", "linear"):
        model = load_model(str(tmp_path / attention), attention=attention)
        assert hasattr(model.config, "linear_attention") is (attention == "linear")
        assert type(load_model(str(tmp_path / attention))) is type(model)
    with pytest.raises(ArgumentError, match=r"`teacher` must be a softmax model, and this one is patched, got .*Sure"):
        load_model(str(tmp_path / "linear"), "teacher", attention="softmax", remedy="Sure?")
    with pytest.raises(ArgumentError, match=r"`student` must be a patched model, and this one is softmax, got "):
        load_model(str(tmp_path / "softmax"), "student", attention="linear")
    weights = tmp_path / "softmax" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"`it` must be a causal language model that can be loaded, got "):
        load_model(str(tmp_path / "softmax"), "it")
    weights = tmp_path / "linear" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"`it` must hold whole safetensors files, got "):
        load_model(str(tmp_path / "linear"), "it")
    with pytest.raises(CheckpointError, match=r"`tokenizer` must be loadable from the model's folder, got "):
        load_tokenizer(str(tmp_path / "softmax"))


@pytest.mark.parametrize("content", [None, "no JSON", "{}", {"model_type": "llama", "hidden_size": "wide"}])
def test_configs_that_are_none_are_refused_in_one_line(tmp_path, content):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"`config` must be a folder or hub name with a model's config.json"
    ) as it:
        load_config(str(tmp_path), "config")
    assert "\n" not in str(it.value)


def test_a_name_that_can_be_no_folder_is_refused():
    with pytest.raises(CheckpointError, match=r"`teacher` must be a folder or hub name .*got '/nope'. There is none."):
        load_model("/nope", "teacher")


def test_a_mistyped_folder_is_told_from_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "student").mkdir(parents=True)
    for name in ("runs/studnet", "./runs/studnet", str(tmp_path / "runs" / "studnet")):
        with pytest.raises(CheckpointError, match=r"got '.*studnet'\. (There is none|No folder of that name.*)\. Did"):
            load_config(name, local_files_only=True)
    with pytest.raises(CheckpointError, match=r"got 'runs/other'\. No folder of that name is here\. Loading it failed"):
        load_config("runs/other", local_files_only=True)


@pytest.mark.parametrize("patched", [False, True])
def test_a_checkpoint_without_its_head_is_refused(tmp_path, patched):
    model = tiny_linear() if patched else tiny_llama()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"`model` must hold all weights of a causal language model, .*It lacks lm_head.weight"
    ):
        load_model(str(tmp_path))
    # A backbone alone is a checkpoint of the same model type.
    backbone = {name.removeprefix("model."): x for name, x in tensors.items()}
    save_file(backbone, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        load_model(str(tmp_path))
    save_file(tensors | {"lm_head.weight": head[:10]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"`model` must hold all weights .*It lacks lm_head.weight of the model's s"
    ):
        load_model(str(tmp_path))


def test_weights_that_are_tied_are_not_missing(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_model(str(tmp_path))
