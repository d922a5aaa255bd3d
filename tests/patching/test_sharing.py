"""Saving, sharing and loading, by every way that Transformers' users take."""

import copy
import json
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from hf_linear_attn import from_pretrained, patch_model, unpatch_model
from hf_linear_attn.errors import ArgumentError, CheckpointError, HFLinearAttnError
from hf_linear_attn.feature_maps import base, load_feature_maps
from hf_linear_attn.patching import is_patched

from .checks import Subject, close
from .zoo import VOCAB, tiny_model

WINDOW = {"feature_map": "hedgehog", "window": 3, "sinks": 2}


@pytest.fixture
def patched():
    return patch_model(tiny_model("causal", "gpt2"), **WINDOW)


def alike(loaded, model, task="causal"):
    """Assert that a loaded model gives the logits of the one that was saved."""
    ids = Subject(model, task).tokens()
    close(Subject(loaded.eval(), task).logits(ids), Subject(model, task).logits(ids), "logits after loading")


def tokenizer_for(folder):
    """Write a tokenizer of one word per token, and load it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), VOCAB))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_what_a_saved_folder_holds(patched, tmp_path):
    patched.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LinearAttentionGPT2LMHeadModel"]
    assert config["model_type"] == "gpt2"
    assert config["linear_attention"]["window"] == 3
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_linear_attention.GPT2LMHeadModel"
    assert config["auto_map"]["AutoModel"] == "modeling_linear_attention.GPT2Model"
    assert "AutoModelForCausalLM.from_pretrained" in (tmp_path / "README.md").read_text()
    assert "hf_linear_attn import from_pretrained" in (tmp_path / "README.md").read_text()
    assert not list(tmp_path.glob("*.bin"))
    code = (tmp_path / "modeling_linear_attention.py").read_text()
    assert {"import transformers", "GPT2Model = linear_attention_class(transformers.GPT2Model)"} <= {*code.splitlines()}


def test_a_softmax_model_that_was_patched_saves_its_own_name(patched, tmp_path):
    patched.save_pretrained(tmp_path / "patched")
    loaded = from_pretrained(tmp_path / "patched")
    unpatch_model(loaded).save_pretrained(tmp_path / "softmax")
    config = json.loads((tmp_path / "softmax" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert not {"auto_map", "linear_attention"} & config.keys()


def test_folders_of_the_first_form_load(patched, tmp_path):
    """They name Transformers' class, one Auto class, and that class alone in their code."""
    patched.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_linear_attention.GPT2LMHeadModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_linear_attention.py").write_text(
        "from transformers import GPT2LMHeadModel as _Softmax\n"
        "from hf_linear_attn.patching.checkpoint import linear_attention_class\n"
        "GPT2LMHeadModel = linear_attention_class(_Softmax)\n"
    )
    for loaded in (from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)):
        alike(loaded, patched)


@pytest.mark.parametrize(
    ("task", "name", "auto", "settings"),
    [
        ("causal", "gpt2", AutoModelForCausalLM, WINDOW),
        ("causal", "llama", AutoModelForCausalLM, {"feature_map": "elu", "layers": [1]}),
        # Its config has no class of its own: Llama's is registered for it.
        ("causal", "internlm3", AutoModelForCausalLM, {"feature_map": "elu"}),
        ("masked", "bert", AutoModelForMaskedLM, {"feature_map": "hedgehog"}),
        ("seq2seq", "bart", AutoModelForSeq2SeqLM, {"feature_map": "elu"}),
    ],
)
def test_auto_classes_load_it_with_the_folders_code(task, name, auto, settings, tmp_path):
    model = patch_model(tiny_model(task, name), **settings)
    model.save_pretrained(tmp_path)
    loaded, info = auto.from_pretrained(tmp_path, trust_remote_code=True, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert is_patched(loaded)
    alike(loaded, model, task)


@pytest.mark.parametrize(
    ("task", "name", "auto", "cls"),
    [
        ("causal", "llama", AutoModel, "LlamaModel"),
        ("causal", "llama", AutoModelForSequenceClassification, "LlamaForSequenceClassification"),
        ("causal", "gpt2", AutoModelForTokenClassification, "GPT2ForTokenClassification"),
        ("masked", "bert", AutoModelForMultipleChoice, "BertForMultipleChoice"),
        ("causal", "gemma3", AutoModelForImageTextToText, "Gemma3ForConditionalGeneration"),
        ("seq2seq", "bart", AutoModel, "BartModel"),
    ],
)
def test_auto_classes_of_other_tasks_load_it_patched(task, name, auto, cls, tmp_path):
    model = patch_model(tiny_model(task, name), "hedgehog")
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded).__name__ == cls
    weights = {name.split(".", 1)[1]: x for name, x in model.state_dict().items() if "linear_attention" in name}
    found = {name: x for name, x in loaded.state_dict().items() if "linear_attention" in name}
    assert len(found) == len(weights)
    assert all(any(name.endswith(end) and torch.equal(x, weights[end]) for end in weights) for name, x in found.items())


@pytest.mark.parametrize(("task", "name"), [("causal", "gpt2"), ("causal", "gemma3"), ("seq2seq", "bart")])
def test_the_model_within_loads_patched_where_it_is_saved_alone(task, name, tmp_path):
    inner = patch_model(tiny_model(task, name), "hedgehog").base_model
    inner.save_pretrained(tmp_path)
    ids = torch.arange(3, 12)[None]
    for load in (partial(AutoModel.from_pretrained, trust_remote_code=True), from_pretrained):
        loaded, info = load(tmp_path, output_loading_info=True)
        assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        close(loaded.eval()(ids)[0], inner(ids)[0], "hidden states")


def test_a_part_whose_config_does_not_say_that_it_is_patched_warns_where_it_is_saved(tmp_path, caplog):
    model = patch_model(tiny_model("causal", "gemma3"), "hedgehog")
    model.model.language_model.save_pretrained(tmp_path / "part")
    assert "Gemma3TextModel: its own config does not name its converted layers" in caplog.text


def test_weights_are_saved_under_the_names_of_the_softmax_models(tmp_path):
    # Transformers finds the names that files have, embed_out for this head, by the class's name.
    model = tiny_model("causal", "gpt_neox")
    model.save_pretrained(tmp_path / "softmax")
    patch_model(model, "hedgehog").save_pretrained(tmp_path / "patched")
    names, found = (set(load_file(tmp_path / kind / "model.safetensors")) for kind in ("softmax", "patched"))
    assert "embed_out.weight" in names
    assert {name for name in found if "linear_attention" not in name} == names
    alike(from_pretrained(tmp_path / "patched"), model)


def test_a_map_of_the_user_has_to_be_registered_first(users_map, tmp_path):
    load_feature_maps(users_map)
    patch_model(tiny_model("causal", "llama"), "cubed").save_pretrained(tmp_path / "saved")
    base._REGISTRY.pop("cubed")
    for load in (from_pretrained, partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=True)):
        with pytest.raises(
            HFLinearAttnError, match=r"`feature_map` must be a registered name, got 'cubed'. Import what"
        ):
            load(tmp_path / "saved")


def test_a_class_whose_layers_are_others_is_refused(tmp_path):
    """BART's decoder alone has no layers 2 and 3."""
    patch_model(tiny_model("seq2seq", "bart"), "hedgehog").save_pretrained(tmp_path / "all")
    with pytest.raises(ArgumentError, match=r"`layers` must be indices from 0 to 1, got \[2, 3\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "all", trust_remote_code=True)
    patch_model(tiny_model("seq2seq", "bart"), "hedgehog", layers=[0]).save_pretrained(tmp_path / "encoder")
    with pytest.raises(CheckpointError, match=r"hold the tensors of every patched layer, without missing keys, .*Bart"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "encoder", trust_remote_code=True)


def test_sharded_files(patched, tmp_path):
    patched.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, info = from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    alike(loaded, patched)


def test_push_to_hub_uploads_what_loads_again(patched, tmp_path, monkeypatch):
    """The upload itself is the hub's; what would go there is a whole folder."""
    uploaded = {}

    class Hub:
        def create_repo(self, repo_id, **options):
            return SimpleNamespace(repo_id=f"user/{repo_id}")

        def create_commit(self, repo_id, operations, **options):
            assert repo_id == "user/converted"
            for operation in operations:
                with operation.as_file() as file:
                    uploaded[operation.path_in_repo] = file.read()

    monkeypatch.setattr("transformers.utils.hub.hf_api", Hub)
    patched.push_to_hub("converted", tags=["mine"])
    assert {"config.json", "model.safetensors", "modeling_linear_attention.py", "README.md"} <= uploaded.keys()
    card = uploaded["README.md"].decode()
    assert "from hf_linear_attn import from_pretrained" in card
    assert ModelCard(card).data.tags == ["linear-attention", "hf_linear_attn", "mine"]
    for name, content in uploaded.items():
        (tmp_path / name).write_bytes(content)
    alike(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True), patched)


def test_a_loaded_model_saves_again(patched, tmp_path):
    patched.save_pretrained(tmp_path / "a")
    from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    for name in ("config.json", "modeling_linear_attention.py", "README.md"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_load_in_half_precision_keeps_everything(patched, tmp_path):
    patched.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.bfloat16)
    part = next(module for module in loaded.modules() if type(module).__name__ == "LinearAttention")
    assert {p.dtype for p in part.parameters()} == {torch.bfloat16}
    expected = patched.transformer.h[0].attn.linear_attention.mix_bias.bfloat16()
    assert torch.equal(loaded.transformer.h[0].attn.linear_attention.mix_bias, expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_independent(patched, duplicate):
    ids = Subject(patched, "causal").tokens()
    expected = Subject(patched, "causal").logits(ids)
    twin = duplicate(patched)
    assert torch.equal(Subject(twin, "causal").logits(ids), expected)
    with torch.no_grad():
        twin.transformer.h[0].attn.linear_attention.mix_bias.add_(1)
    assert torch.equal(Subject(patched, "causal").logits(ids), expected)


def test_fields_of_the_config_are_set_as_transformers_sets_them(patched, tmp_path):
    patched.save_pretrained(tmp_path)
    options = {"use_cache": False, "resid_pdrop": 0.25, "dtype": "bfloat16", "local_files_only": True}
    loaded, info = from_pretrained(tmp_path, output_loading_info=True, **options)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, **options)
    assert loaded.config.use_cache is False
    assert loaded.transformer.h[0].attn.resid_dropout.p == 0.25
    assert loaded.dtype == expected.dtype == torch.bfloat16
    assert loaded.config.to_dict() == expected.config.to_dict()
    assert not info["missing_keys"]
    assert from_pretrained(tmp_path, dtype="auto").dtype == torch.float32
    with pytest.raises(CheckpointError, match="no_such_option"):
        from_pretrained(tmp_path, no_such_option=1)


def test_without_the_package_nothing_is_silent(patched, tmp_path):
    patched.save_pretrained(tmp_path)
    _, info = type(tiny_model("causal", "gpt2")).from_pretrained(tmp_path, output_loading_info=True)
    assert any("linear_attention" in str(key) for key in info["unexpected_keys"])


def test_a_text_generation_pipeline(patched, tmp_path):
    patched.save_pretrained(tmp_path)
    tokenizer = tokenizer_for(tmp_path)
    generate = pipeline("text-generation", model=str(tmp_path), tokenizer=tokenizer, trust_remote_code=True)
    assert is_patched(generate.model)
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    texts = generate(["w5 w6 w7", "w9 w10 w11 w12 w13"], batch_size=2, **options)
    assert texts[0] == generate("w5 w6 w7", **options)


@pytest.mark.optional
def test_lm_eval_scores_a_folder(patched, tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    patched.save_pretrained(tmp_path)
    tokenizer_for(tmp_path)
    lm = HFLM(pretrained=str(tmp_path), trust_remote_code=True, device="cpu", batch_size=2)
    assert is_patched(lm.model)
    asked = [("w5 w6", " w7 w8"), ("w9 w10 w11", " w12")]
    scores = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)])
    for (context, continuation), (score, _) in zip(asked, scores, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in (context + continuation).split()]])
        start = len(context.split())
        logits = Subject(patched, "causal").logits(ids)[0, start - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, ids[0, start:, None]).sum()
        assert score == pytest.approx(float(expected), rel=1e-4)


def trl_settings(cls, folder, **changes):
    return cls(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_length=16,
        save_strategy="no",
        **changes,
    )


def texts():
    return [" ".join(f"w{5 + (i + j) % 50}" for j in range(12)) for i in range(8)]


def biases(model):
    return model.transformer.h[0].attn.linear_attention.mix_bias.detach().clone()


@pytest.mark.optional
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("by_name", [False, True], ids=["model", "folder"])
def test_trl_fine_tunes_it(patched, by_name, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = tokenizer_for(tmp_path)
    patched.save_pretrained(tmp_path)
    data = Dataset.from_list([{"text": text} for text in texts()])
    settings = trl_settings(SFTConfig, tmp_path / "out", trust_remote_code=True)
    model = str(tmp_path) if by_name else patched
    trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    assert is_patched(trainer.model)
    before = biases(trainer.model)
    trainer.train()
    assert not torch.equal(biases(trainer.model), before)


@pytest.mark.optional
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("by_name", [False, True], ids=["model", "folder"])
def test_trls_reference_model_is_patched_too(patched, by_name, tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    tokenizer = tokenizer_for(tmp_path)
    patched.save_pretrained(tmp_path)
    pairs = [{"prompt": "w5 w6", "chosen": a, "rejected": b} for a, b in zip(texts(), reversed(texts()), strict=True)]
    settings = trl_settings(DPOConfig, tmp_path / "out", trust_remote_code=True)
    model = str(tmp_path) if by_name else from_pretrained(tmp_path)
    data = Dataset.from_list(pairs)
    trainer = DPOTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    assert is_patched(trainer.model)
    assert is_patched(trainer.ref_model)
    trainer.train()
    assert torch.equal(biases(trainer.ref_model), biases(patched))
    assert not torch.equal(biases(trainer.model), biases(patched))
