"""Folders that somebody else made: what lies in them is never run, and what they name outside of them is not read."""

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.cli import main
from hf_linear_attn.errors import CheckpointError, HFLinearAttnError
from hf_linear_attn.loading import load_model, load_tokenizer
from tests.distill.tiny import byte_tokenizer, tiny_teacher

EVIL = """
from pathlib import Path

Path({mark!r}).touch()

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ProcessorMixin


class Config(LlamaConfig):
    model_type = "evil"


class Model(LlamaForCausalLM):
    pass


class Tokenizer(PreTrainedTokenizerFast):
    pass


class Processor(ProcessorMixin):
    pass


def generate(*args, **kwargs):
    Path({mark!r}).touch()
"""


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tiny_teacher().save_pretrained(folder / "softmax")
    patch_model(tiny_teacher(), "hedgehog", window=4).save_pretrained(folder / "patched")
    for kind in ("softmax", "patched"):
        byte_tokenizer().save_pretrained(folder / kind)
    return folder


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """Return a file that hostile code would make; whoever is asked whether it may run says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return tmp_path / "executed"


def copied(saved, kind, tmp_path):
    return Path(shutil.copytree(saved / kind, tmp_path / kind))


def change(path, changes):
    """Change a JSON file; None takes a name out."""
    values = json.loads(path.read_text()) if path.exists() else {}
    for name, value in changes.items():
        values.pop(name, None)
        if value is not None:
            values[name] = value
    path.write_text(json.dumps(values))


def refusal(call):
    """Return what a call was refused with, the message or the exit status; None where it was not."""
    try:
        found = call()
        if isinstance(found, torch.nn.Module):
            found.generate(torch.tensor([[3, 4]]), max_new_tokens=2)
    except HFLinearAttnError as error:
        return str(error)
    except SystemExit as stop:
        return stop.code
    return None


def load_everything(folder):
    """Do with a folder what the package can do with it; return what each was refused with."""
    (folder / "text.txt").write_text("one two three four " * 20)
    inspect = "inspect {0} --text-file {0}/text.txt --output-dir {0}/inspection --maps elu --max-tokens 16"
    calls = {
        "from_pretrained": lambda: from_pretrained(folder),
        "load_model": lambda: load_model(str(folder)),
        "offline": lambda: load_model(str(folder), local_files_only=True),
        "load_tokenizer": lambda: load_tokenizer(str(folder)),
        "plan": lambda: main(f"plan {folder}".split()),
        "inspect": lambda: main(inspect.format(folder).split()),
    }
    return {name: refusal(call) for name, call in calls.items()}


AUTO_MAPS = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
    "AutoProcessor": "evil.Processor",
}


@pytest.mark.parametrize("kind", ["softmax", "patched"])
@pytest.mark.parametrize("where", ["", "{folder}--", "someone/else--"])
@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_that_a_folder_maps_to_is_not_run(saved, tmp_path, mark, kind, where, model_type):
    folder = copied(saved, kind, tmp_path)
    for file in ("evil.py", "modeling_linear_attention.py", "sitecustomize.py", "conftest.py"):
        (folder / file).write_text(EVIL.format(mark=str(mark)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(EVIL.format(mark=str(mark)))
    where = where.format(folder=folder)
    maps = {
        auto: [where + name for name in names] if isinstance(names, list) else where + names
        for auto, names in AUTO_MAPS.items()
    }
    change(folder / "config.json", {"auto_map": maps, "model_type": model_type})
    change(folder / "tokenizer_config.json", {"auto_map": maps, "tokenizer_class": "Tokenizer"})
    for file in ("processor_config.json", "preprocessor_config.json"):
        change(folder / file, {"auto_map": maps, "processor_class": "Processor"})
    refused = load_everything(folder)
    assert not mark.exists()
    if model_type == "evil":
        assert (refused["plan"], refused["inspect"]) == (2, 2)
        with pytest.raises(CheckpointError, match=r"`it` must be a folder or hub name with a model's config.json"):
            load_model(str(folder), "it")


def test_code_would_run_if_it_were_let(saved, tmp_path, mark, monkeypatch):
    # The marks that other tests look for can be made.
    from transformers import AutoConfig

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = copied(saved, "softmax", tmp_path)
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    change(folder / "config.json", {"auto_map": AUTO_MAPS, "model_type": "evil"})
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists()
    mark.unlink()
    pickle.loads(pickle.dumps(Bomb(str(mark))))
    assert mark.exists()


@pytest.mark.parametrize("kind", ["softmax", "patched"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "optimizer.pt", "training_args.bin"])
def test_pickles_are_not_read(saved, tmp_path, mark, kind, name):
    folder = copied(saved, kind, tmp_path)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        with (folder / "pytorch_model.bin.index.json").open("w") as file:
            json.dump({"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}, file)
    torch.save({"model.embed_tokens.weight": Bomb(str(mark))}, folder / name)
    load_everything(folder)
    assert not mark.exists()
    if name in ("pytorch_model.bin", "model.safetensors"):
        with pytest.raises(CheckpointError):
            load_model(str(folder))


@pytest.mark.parametrize("kind", ["softmax", "patched"])
@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "{outside}", "sub/../../outside.safetensors", "model.bin", "", ".", 3, None, ["x"]],
    ids=str,
)
def test_an_index_names_files_beside_it(saved, tmp_path, kind, name):
    folder = copied(saved, kind, tmp_path)
    outside = tmp_path / "outside.safetensors"
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, outside, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "sub").mkdir()
    if isinstance(name, str):
        name = name.format(outside=outside)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load = from_pretrained if kind == "patched" else load_model
    with pytest.raises(CheckpointError, match=r"must name safetensors files beside its index only, got "):
        load(str(folder))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(saved, tmp_path, text):
    folder = copied(saved, "softmax", tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"`model` must have a whole index of weights, got 'model.safe"):
        load_model(str(folder))


def test_adapters_that_name_another_model_are_refused(saved, tmp_path, mark):
    folder = copied(saved, "softmax", tmp_path)
    torch.save({"x": Bomb(str(mark))}, folder / "adapter_model.bin")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/else"}))
    with pytest.raises(CheckpointError, match=r"`model` must hold a model without adapters beside it"):
        load_model(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["pipe", "broken link"])
def test_what_is_no_file_is_refused(saved, tmp_path, make):
    folder = copied(saved, "softmax", tmp_path)
    (folder / "generation_config.json").unlink()
    make(folder / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"`model` must hold files and folders only, got 'generation_con"):
        load_model(str(folder))


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


CONFIGS = {
    "many layers": {"num_hidden_layers": 10**9},
    "huge layers": {"num_hidden_layers": 10**30},
    "wide": {"hidden_size": 10**30},
    "wide but whole": {"hidden_size": 2**31 - 1},
    "words": {"vocab_size": 10**15},
    "many words": {"vocab_size": 2**31 - 1},
    "negative": {"vocab_size": -5},
    "no heads": {"num_attention_heads": 0},
    "many heads": {"num_attention_heads": 2**31 - 1},
    "odd heads": {"num_key_value_heads": 3},
    "positions": {"max_position_embeddings": 10**18},
    "text": {"hidden_size": "16"},
    "list": {"hidden_size": [16]},
    "nan": {"rms_norm_eps": float("nan")},
    "deep": {"surprise": deep(200)},
    "very deep": {"surprise": deep(900)},
    "dtype of something else": {"dtype": "load"},
    "dtype is no text": {"dtype": [1]},
    "dtype is private": {"dtype": "__builtins__"},
    "a kernel to fetch": {"attn_implementation": "someone/kernel"},
    "a kernel to fetch, as an attribute": {"_attn_implementation": "someone/kernel:flash"},
    "kernels by part": {"attn_implementation": {"text_config": "someone/kernel"}},
    "quantised by nobody": {"quantization_config": {"quant_method": "evil"}},
    "quantised by a list": {"quantization_config": [1]},
    "an attention of no name": {"attn_implementation": "evil"},
    "rope": {"rope_parameters": {"rope_type": "__class__"}},
    "rope of nothing": {"rope_scaling": 5},
    "activation": {"hidden_act": "__init__"},
    "activation is no text": {"hidden_act": {"a": 1}},
    "weights elsewhere": {"transformers_weights": "../outside.safetensors"},
    "architectures is a text": {"architectures": "LlamaForCausalLM"},
    "sub-config": {"text_config": 5},
    "torchscript": {"return_dict": "x", "output_attentions": "x"},
    "layer types": {"layer_types": ["evil", "evil"]},
    "tokens": {"bos_token_id": "x", "eos_token_id": {"a": 1}, "pad_token_id": -7},
}


@pytest.mark.parametrize("kind", ["softmax", "patched"])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_configs_are_loaded_or_refused_in_time(saved, tmp_path, mark, kind, changes):
    folder = copied(saved, kind, tmp_path)
    change(folder / "config.json", changes)
    start = time.process_time()
    load = from_pretrained if kind == "patched" else load_model
    assert "\n" not in (refusal(lambda: load(str(folder))) or "")
    assert time.process_time() - start < 5
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "AutoModel", "AutoModelForCausalLM", "GenerationConfig", "LlamaConfig", "pipeline", "logging", "__doc__",
        "PreTrainedModel", "__getattr__", "utils.logging", "os", "BertModel", "LinearAttention", "", 3, None,
        ["LlamaModel"],
    ],
    ids=str,
)  # fmt: skip
def test_architectures_are_classes_of_models(saved, tmp_path, name):
    folder = copied(saved, "patched", tmp_path)
    change(folder / "config.json", {"architectures": [name]})
    # Some versions of Transformers look at types themselves, before the names are asked for.
    typed = "" if isinstance(name, str) else "|`path` must be .*Validation error for field 'architectures'"
    with pytest.raises(CheckpointError, match=rf"`architectures` must name a (model.s )?class{typed}"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"feature_map": "__init__"},
        {"feature_map": "FeatureMap"},
        {"feature_map": "../evil"},
        {"feature_map": "evil"},
        {"feature_map": ["elu"]},
        {"feature_map_options": {"num_features": 10**15}},
        {"feature_map_options": {"num_features": "16"}},
        {"feature_map_options": {"__class__": 1}},
        {"feature_map_options": deep(100)},
        {"layers": [10**30]},
        {"layers": "all"},
        {"layers": [-1]},
        {"layers": []},
        {"window": 10**12},
        {"window": 4.0},
        {"window": "4"},
        {"sinks": 10**12},
        {"eps": "1e-6"},
        {"backend": "os.system"},
        {"backend": None},
        {"mix": "__init__"},
        {"trained_length": "long"},
        {"format_version": 1e9},
        {"surprise": deep(500)},
        *("elu", [], [1], 3, True, 0.5),
    ],
    ids=lambda value: str(value)[:60],
)
def test_settings_of_a_patched_folder_are_checked(saved, tmp_path, settings):
    folder = copied(saved, "patched", tmp_path)
    own = json.loads((folder / "config.json").read_text())["linear_attention"]
    change(folder / "config.json", {"linear_attention": own | settings if isinstance(settings, dict) else settings})
    for load in (from_pretrained, load_model):
        with pytest.raises(CheckpointError):
            load(str(folder))


TOKENIZERS = {
    "class of something else": ("tokenizer_config.json", {"tokenizer_class": "PreTrainedModel"}),
    "class is a path": ("tokenizer_config.json", {"tokenizer_class": "os.system"}),
    "class is no text": ("tokenizer_config.json", {"tokenizer_class": [1]}),
    "special token": ("tokenizer_config.json", {"bos_token": {"__type": "AddedToken", "content": 5}}),
    "length": ("tokenizer_config.json", {"model_max_length": "x"}),
    "no model": ("tokenizer.json", {"model": None}),
    "model of no type": ("tokenizer.json", {"model": {"type": "Evil"}}),
    "merges": ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": [["a", "b"]]}}),
    "ids": ("tokenizer.json", {"added_tokens": [{"id": 10**18, "content": "x", "special": True}]}),
}


@pytest.mark.parametrize(("file", "changes"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers_are_loaded_or_refused(saved, tmp_path, file, changes):
    folder = copied(saved, "softmax", tmp_path)
    change(folder / file, changes)
    message = refusal(lambda: load_tokenizer(str(folder)))
    assert message is None or message.startswith("`tokenizer` must be loadable from the model's folder")


def test_a_chat_template_runs_in_a_box(saved, tmp_path, mark):
    folder = copied(saved, "softmax", tmp_path)
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(mark) + "') }}"
    change(folder / "tokenizer_config.json", {"chat_template": template})
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(Exception, match=r"unsafe|undefined"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert not mark.exists()
