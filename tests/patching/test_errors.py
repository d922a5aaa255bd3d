"""Bad input gets an error of one form, and never a wrong answer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaForSequenceClassification, MambaConfig, MambaForCausalLM

from hf_linear_attn import from_pretrained, patch_model, unpatch_model
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, BackendError, CheckpointError, UnsupportedError
from hf_linear_attn.patching import attention_layers, disable_branch
from hf_linear_attn.patching.call_cache import NAME

from . import checks
from .checks import Subject
from .zoo import tiny_model


def llama():
    return tiny_model("causal", "llama")


@pytest.fixture
def plain():
    return Subject(patch_model(llama(), "elu"), "causal")


@pytest.fixture
def mixed():
    return Subject(patch_model(llama(), "elu", layers=[1]), "causal")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_map": "elo"}, r"`feature_map` must be a registered name, got 'elo'\. .*; available: .*elu"),
        ({"layers": "some"}, r"`layers` must be 'all', indices, a callable or None, got 'some'\. Use 'all'\."),
        ({"layers": [0, 7]}, r"`layers` must be indices from 0 to 1, got \[7\]\. Leave those out\."),
        ({"layers": []}, r"`layers` must choose at least one layer, got \[\] \(LlamaForCausalLM\)\. Name at least"),
        ({"layers": lambda *_: False}, r"`layers` must choose at least one layer, .* chose none of the 2"),
        ({"window": 0}, r"`window` must be at least 1 token, or None, got 0\."),
        ({"sinks": 2}, r"`sinks` must be >= 0, and 0 without a window, got 2\."),
        (
            {"window": 4, "mix": "sum"},
            r"`mix` must be a known rule, got 'sum'\. .*; available: gate, key, shared, window\.",
        ),
        ({"mix": "window"}, r"`mix` must come with a window, got 'window'\."),
        ({"eps": 0.0}, r"`eps` must be greater than 0, got 0\.0\."),
        ({"layers": 3}, r"`layers` must be"),
        ({"layers": [0.0]}, r"`layers` must be"),
        ({"layers": ["0"]}, r"`layers` must be"),
        ({"feature_map": "hedgehog", "feature_map_options": {"num_features": "8"}}, r"`num_features` must be a whole"),
        (
            {"window": 4, "kept": -1},
            r"`kept` must be >= 0, and 0 without a window, got -1\. Set window= too, or kept=0",
        ),
        ({"kept": 2}, r"`kept` must be >= 0, and 0 without a window, got 2\."),
        ({"window": 4, "kept": 2**20}, r"`kept` must be at most 65536 keys, got 1048576\. Lower it\."),
        ({"window": 4, "kept": 1.5}, r"`kept` must be a whole number, got 1.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings(settings, message):
    model = llama()
    before = list(model.state_dict())
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        patch_model(model, **settings)
    assert list(model.state_dict()) == before
    assert model.config._attn_implementation != "hf_linear_attn"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
def test_a_backend_that_runs_nowhere_here_is_refused_when_it_is_asked_for(monkeypatch):
    model = llama()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match=r"`backend` must be able to run here, got 'triton'\. .*use backend='torch'"):
        patch_model(model, backend="triton")
    monkeypatch.setattr("hf_linear_attn.ops.dispatch.HAS_NUMBA", False)
    with pytest.raises(BackendError, match=r"`backend` must be able to run here, got 'numba'\. Numba is not installed"):
        patch_model(model, backend="numba")
    assert model.config._attn_implementation != "hf_linear_attn"


def test_models(plain):
    with pytest.raises(ArgumentTypeError, match=r"`model` must be a Transformers .*, got 'Linear'\. .*get_base_model"):
        patch_model(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentTypeError, match=r"got 'OptimizedModule'\. .*torch\.compile\(model\) then.*\._orig_mod"):
        patch_model(torch.compile(tiny_model("causal", "llama")))
    with pytest.raises(ArgumentError, match=r"`model` must be a softmax model, got 'a patched LlamaForCausalLM'\."):
        patch_model(plain.model)
    with pytest.raises(ArgumentError, match=r"`model` must be patched, got 'LlamaForCausalLM'\."):
        unpatch_model(llama())
    with pytest.raises(ArgumentError, match=r"`window` must be None for bidirectional attention, got 4 \(bert\.enc"):
        patch_model(tiny_model("masked", "bert"), window=4)
    with pytest.raises(
        UnsupportedError, match=r"`model` must have self-attention .*'MambaForCausalLM'\. There is nothing"
    ):
        patch_model(MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)))
    softmax = llama()
    softmax.set_attn_implementation("hf_linear_attn")
    with pytest.raises(UnsupportedError, match=r"`attn_implementation` must be set by patch_model, got 'hf_lin"):
        Subject(softmax, "causal").logits(plain.tokens())


def test_masks(plain, mixed):
    ids = plain.tokens(6)
    with pytest.raises(
        ArgumentError, match=r"`attention_mask` must cover the 0 earlier and 6 new tokens, got \(2, 9\)"
    ):
        plain.logits(ids, attention_mask=torch.tensor([[0] + [1] * 8] * 2))
    with pytest.raises(
        ArgumentError, match=r"`attention_mask` must cover the 0 earlier and 6 new tokens, got \(2, 4\)"
    ):
        plain.logits(ids, attention_mask=torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(UnsupportedError, match=r"`attention_mask` must be a padding mask \[B, T >= 6\], got \(2, 6, 6"):
        plain.logits(ids, attention_mask=torch.ones(2, 6, 6, dtype=torch.long))
    custom = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    custom[:, :, :3, :3] = True
    for subject, layer in ((plain, 0), (mixed, 1)):
        with pytest.raises(UnsupportedError, match=rf"`attention_mask` must be causal or .*\(model.layers.{layer}"):
            subject.logits(ids, attention_mask=custom)


def test_a_short_cache_is_refused(plain):
    cache = DynamicCache(config=plain.model.config)
    cache.layers.pop()
    with pytest.raises(ArgumentError, match=r"`cache` must have a layer 1, got 'a DynamicCache of 1 layers'"):
        plain.logits(plain.tokens(), **{NAME: cache})


def test_branches(plain):
    with pytest.raises(
        ArgumentError, match=r"`branch` must be a branch .*, got 'far'\. .*; available: kept, linear, sinks, w"
    ):
        disable_branch(plain.model, "far").__enter__()
    with pytest.raises(ArgumentError, match=r"`model` must be patched with a window, got 'LlamaForCausalLM'"):
        disable_branch(plain.model, "window").__enter__()


@pytest.fixture
def saved(plain, tmp_path):
    plain.model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, r"`format_version` must be at most 1, got 99\. Update hf_linear_attn"),
        ({"surprise": 1}, r"`linear_attention` must hold known settings only, got \['surprise'\]"),
        ({"feature_map": None}, r"`linear_attention` must hold every setting .*of the name feature_map'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_of_checkpoints(saved, changes, message):
    config = json.loads((saved / "config.json").read_text())
    settings = config["linear_attention"] | changes
    config["linear_attention"] = {name: value for name, value in settings.items() if changes.get(name, 1) is not None}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(saved)


def without(folder, *names):
    """Take weights out of a folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k not in names}, path, metadata={"format": "pt"})
    assert set(names) <= set(tensors)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_missing_are_not_drawn_at_random(saved, name):
    without(saved, name)
    with pytest.raises(
        CheckpointError, match=rf"`path` must hold all weights of a patched .*It lacks {name}, which wo"
    ):
        from_pretrained(saved)
    model, info = from_pretrained(saved, ignore_mismatched_sizes=True, output_loading_info=True)
    assert info["missing_keys"] == {name}
    assert type(from_pretrained(saved, ignore_mismatched_sizes=True)) is type(model)


def test_weights_that_are_tied_are_not_missing(tmp_path):
    model = tiny_model("causal", "llama", tie_word_embeddings=True)
    patch_model(model, "elu").save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(from_pretrained(tmp_path).lm_head.weight, model.model.embed_tokens.weight)
    without(tmp_path, "model.embed_tokens.weight")
    with pytest.raises(CheckpointError, match=r"It lacks .*model.embed_tokens.weight"):
        from_pretrained(tmp_path)


def test_a_head_of_another_task_is_drawn_where_transformers_is_asked_to(tmp_path):
    patch_model(LlamaForSequenceClassification(tiny_model("causal", "llama").config), "elu").save_pretrained(tmp_path)
    assert from_pretrained(tmp_path).score.weight.shape[0] == 2
    with pytest.raises(CheckpointError, match=r"It lacks score.weight of the model's shape, .*ignore_mismatched_sizes"):
        from_pretrained(tmp_path, num_labels=5)
    loaded = from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert loaded.score.weight.shape[0] == 5


def test_truncated_weights(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"`path` must hold whole safetensors files"):
        from_pretrained(saved)


def test_tampered_weights(saved):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.linear_attention.format_version"
    without(saved, name)
    for may_draw in (False, True):
        with pytest.raises(CheckpointError, match=rf"hold the tensors of every .*without missing keys.*{name}"):
            from_pretrained(saved, ignore_mismatched_sizes=may_draw)
    save_file(tensors | {name.replace("format_version", "x"): torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"without unexpected keys"):
        from_pretrained(saved)


def test_folders_that_hold_no_patched_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"`path` must be a folder or hub name with a model's config.json"):
        from_pretrained(tmp_path / "nowhere")
    for path in (None, 3, llama()):
        with pytest.raises(ArgumentTypeError, match=r"`path` must be a text or a path, got .*Name a file or f") as it:
            from_pretrained(path)
        assert "\n" not in str(it.value)
    llama().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"`path` must hold a patched model, .*call patch_model"):
        from_pretrained(tmp_path)


def test_nothing_in_a_folder_is_executed(saved):
    with pytest.raises(ArgumentError, match=r"`trust_remote_code` must not be set, got True"):
        from_pretrained(saved, trust_remote_code=True)
    (saved / "modeling_linear_attention.py").write_text("raise SystemExit")
    from_pretrained(saved)


def test_a_list_of_no_names_says_so():
    error = ArgumentError("suite", "be a known suite", "speed", "Use one of those.", available=[])
    assert str(error) == "`suite` must be a known suite, got 'speed'. Use one of those; available: none."


def test_layers_that_are_run_several_times_with_keys_of_each_are_refused():
    """In pieces they met a foreign cache, and only then said so."""
    with pytest.raises(UnsupportedError, match=r"leave layers out that the model runs several times .*got 2 \(model"):
        patch_model(tiny_model("causal", "dory"), feature_map="elu")
    subject = Subject(patch_model(tiny_model("causal", "dory"), feature_map="elu", layers=[0, 3]), "causal")
    checks.cached_decoding(subject)


def test_a_residual_that_attends_to_blocks_of_its_token_is_no_attention_layer():
    """It calls the AttentionInterface, and would have been converted."""
    names = [layer.name for layer in attention_layers(tiny_model("causal", "inkling2_text"))]
    assert names
    assert all(name.endswith(".self_attn") for name in names)
