"""Answers that would be wrong without a word: each is right, or refused by name."""

import pytest
import torch
from transformers import DynamicCache, WhisperConfig, WhisperForConditionalGeneration

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError, BackendError, HFLinearAttnError, UnsupportedError
from hf_linear_attn.patching.call_cache import NAME, returned_cache
from hf_linear_attn.patching.convert import linear_attention_class
from hf_linear_attn.patching.scope import current

from .checks import prompt, signatures, some
from .zoo import tiny_model

SETTINGS = some("plain", "window", "kept") | {"one layer": {"feature_map": "elu", "window": 3, "layers": [1]}}


def patched(**settings):
    return patch_model(tiny_model("causal", "llama"), **settings).eval()


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def model(request):
    return patched(**request.param)


GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def answer(model, ids):
    return model.generate(ids, **GREEDY)


@pytest.mark.parametrize("place", ["model.layers.0.self_attn", "model.layers.0.self_attn.q_proj", "model.layers.1"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_may_call_the_model(model, place, before):
    ids, other = prompt(9, 0), prompt(6, 1)
    expected, inner = answer(model, ids), model(other).logits.detach()
    depth, found = [0], []

    def reenter(*_):
        if depth[0] == 0:
            depth[0] = 1
            with torch.no_grad():
                found.append(model(other, **{NAME: DynamicCache(config=model.config)}).logits)
            depth[0] = 0

    module = model.get_submodule(place)
    handle = module.register_forward_pre_hook(reenter) if before else module.register_forward_hook(reenter)
    assert torch.equal(answer(model, ids), expected)
    handle.remove()
    assert found
    for logits in found:
        torch.testing.assert_close(logits, inner)


def test_a_forward_that_failed_leaves_nothing_behind(model):
    ids = prompt(9, 0)
    expected = answer(model, ids)
    fail = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    inside = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    for handle in (fail, inside):
        with pytest.raises(ZeroDivisionError):
            answer(model, ids)
        handle.remove()
        assert current.model is current.module is None
    assert torch.equal(answer(model, ids), expected)


@pytest.mark.parametrize("cached", [False, True])
def test_padding_may_hold_anything(model, cached):
    ids, mask = prompt(12, 0, rows=2), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    embeddings = model.get_input_embeddings()(ids).detach()
    poisoned = embeddings.masked_fill(mask[..., None] == 0, float("nan"))
    if model.config.linear_attention["layers"] == [1]:
        pytest.skip("a softmax layer multiplies masked values by 0, which NaN survives")
    with torch.no_grad():
        expected = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=cached)
        found = model(inputs_embeds=poisoned, attention_mask=mask, use_cache=cached)
    real = mask.bool()
    torch.testing.assert_close(found.logits[real], expected.logits[real])
    if cached:
        more = {"attention_mask": torch.cat([mask, mask[:, -3:]], 1)}
        found, expected = (
            model(prompt(3, 1, rows=2), **{NAME: returned_cache(x)}, **more).logits for x in (found, expected)
        )
        torch.testing.assert_close(found, expected)


def test_inputs_of_any_name_are_passed_by_keyword():
    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=20,
        max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = patch_model(WhisperForConditionalGeneration(config), layers="all").eval()
    features = torch.randn(1, 8, 40)
    expected = model.generate(features, max_new_tokens=4)
    assert torch.equal(model.generate(input_features=features, max_new_tokens=4), expected)


def test_input_ids_are_passed_by_keyword(model):
    ids = prompt(6, 0)
    expected = answer(model, ids)
    for name in ("input_ids", "inputs"):
        assert torch.equal(model.generate(**{name: ids}, **GREEDY), expected)


def test_attention_maps_asked_for_in_the_config_are_refused(model, tmp_path):
    try:
        model.config.output_attentions = True
    except ValueError:
        # Transformers itself refuses it of a model that is converted throughout.
        return
    with pytest.raises(UnsupportedError, match=r"`output_attentions` must be False"):
        model(prompt(4, 0))
    with pytest.raises(HFLinearAttnError):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    assert not (tmp_path / "saved" / "config.json").exists()


@pytest.mark.parametrize("layers", ["all", [1]])
@pytest.mark.parametrize(
    "task_and_type", [("causal", "llama"), ("causal", "gpt2"), ("causal", "gpt_neox"), ("masked", "bert")], ids=str
)
def test_attention_maps_are_refused(task_and_type, layers):
    # GPT-2 records what its attention returns, and asks it for nothing.
    model = patch_model(tiny_model(*task_and_type), "elu", layers=layers)
    with pytest.raises(UnsupportedError, match=r"`output_attentions` must be False, got True .*hf-linear-attn inspect"):
        model(prompt(4, 0), output_attentions=True)


def test_a_model_whose_config_asked_for_maps_before(tmp_path):
    model = tiny_model("causal", "llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(UnsupportedError, match=r"`output_attentions` must be False"):
        patch_model(model, "elu")(prompt(4, 0))


@pytest.mark.parametrize("more", [1, 3, 20])
def test_a_cache_of_inference_mode_goes_on_outside_of_it(model, more):
    ids = prompt(10 + more, 0)
    with torch.inference_mode():
        cache = returned_cache(model(ids[:, :10], use_cache=True))
    with torch.no_grad():
        expected = model(ids).logits[:, 10:]
        found = model(ids[:, 10:], **{NAME: cache}).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_signatures_stay_those_of_the_class():
    """Also of one with a `generate` of its own; test_architectures.py has others."""
    signatures(linear_attention_class(WhisperForConditionalGeneration), WhisperForConditionalGeneration)


@pytest.mark.parametrize("name", dict.fromkeys([NAME, "past_key_values", None]))
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_a_mask_that_hides_what_was_read_is_refused_however_the_cache_is_passed(model, name):
    ids = prompt(10, 0)
    with torch.no_grad():
        cache = returned_cache(model(ids[:, :8], use_cache=True))
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[:, 2:4] = 0
    args, kwargs = ((mask, None, cache), {}) if name is None else ((mask,), {name: cache})
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"`attention_mask` must show"):
        model(ids[:, 8:], *args, **kwargs)


def test_a_mask_is_looked_at_for_every_cache(model):
    """Also where a hook asks the model again, with the mask that it was called with."""
    ids, caches = prompt(10, 0, rows=2), []
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        for read in (mask[:, :8], torch.ones(2, 8, dtype=torch.long)):
            caches.append(returned_cache(model(ids[:, :8], attention_mask=read, use_cache=True)))

        def ask(module, args):
            model(ids[:, 8:], attention_mask=mask, **{NAME: caches.pop()})

        handle = model.get_submodule("model.layers.0").register_forward_pre_hook(ask)
        with pytest.raises(HFLinearAttnError, match=r"`attention_mask` must"):
            model(ids[:, 8:], attention_mask=mask, **{NAME: caches[0]})
        handle.remove()


def exported_model(kind):
    model = tiny_model("causal", "llama").eval()
    # Softmax passes: what fails is ours.
    ruled = {"gated_delta": SETTINGS["window"] | {"update_rule": "gated_delta"}}
    return model if kind == "softmax" else patch_model(model, **(SETTINGS | ruled)[kind])


@pytest.mark.parametrize("kind", ["softmax", "plain", "window", "gated_delta"])
def test_exports_take_any_length(kind):
    if kind != "plain" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 exports softmax models of one length alone, patched or not")
    exported = exported_model(kind)
    dynamic = {"input_ids": {1: torch.export.Dim("tokens", min=4, max=128)}, "use_cache": None}
    arguments = {"input_ids": prompt(24, 0), "use_cache": False}
    program = torch.export.export(exported, (), arguments, dynamic_shapes=dynamic, strict=False).module()
    for length in (4, 9, 70):
        ids = prompt(length, 1)
        with torch.no_grad():
            found, expected = program(input_ids=ids, use_cache=False).logits, exported(ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_exports_with_a_cache_are_refused(kind):
    exported = exported_model(kind)
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    exported.generation_config.use_cache = True
    exported.generation_config.cache_implementation = "static"
    exported.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 32, "device": "cpu"}
    exportable = TorchExportableModuleForDecoderOnlyLM(exported, batch_size=1, max_cache_len=32, device="cpu")
    with pytest.raises(UnsupportedError, match=r"`cache` must be None while .*use_cache=False"):
        exportable.export(input_ids=torch.tensor([[5]]), cache_position=torch.tensor([0]))


def test_tensors_without_storage_give_shapes(model):
    if model.config.linear_attention["layers"] == [1]:
        pytest.skip("Transformers' own mask for the softmax layer asks for values")
    ids = prompt(9, 0, rows=2)
    logits = model.to("meta")(ids.to("meta"), attention_mask=torch.ones_like(ids, device="meta")).logits
    assert (logits.shape, logits.device.type) == ((2, 9, model.config.vocab_size), "meta")


def test_functional_derivatives_are_refused():
    model = patched(feature_map="elu")
    embeddings = model.get_input_embeddings()(prompt(6, 0)).detach()

    def loss(x):
        return model(inputs_embeds=x, use_cache=False).logits.float().square().mean()

    with pytest.raises(BackendError, match=r"`backend` must be 'reference' under torch.func"):
        torch.func.grad(loss)(embeddings)
    # Of torch's own, rules for forward mode are scripted.
    with pytest.raises(BackendError, match=r"`backend` must be 'reference' for forward-mode"):
        torch.func.jvp(loss, (embeddings,), (torch.ones_like(embeddings),))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "one layer"])
@pytest.mark.parametrize(("task", "kind"), [("causal", "llama"), ("masked", "bert")])
def test_a_traced_model_reads_the_padding_of_every_mask(task, kind, layers):
    model = patch_model(tiny_model(task, kind), "elu", layers=layers).eval().requires_grad_(False)
    ids, ones = prompt(9, 0, rows=2), torch.ones(2, 9, dtype=torch.long)
    padded = ones.clone()
    padded[0, :4] = 0

    def logits(ids, mask):
        return model(ids, attention_mask=mask)[0]

    for mask, other in ((ones, padded), (padded, ones)):
        trace = torch.jit.trace(logits, (ids, mask), check_trace=False)
        real = other.bool()
        torch.testing.assert_close(trace(ids, other)[real], logits(ids, other)[real])


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("settings", some("window", "kept").values(), ids=["window", "kept"])
def test_tracing_a_window_is_refused(settings):
    model = patched(**settings).requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"`window` must be None under torch\.jit\.trace, got .*torch\.export"):
        torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, (prompt(9, 0),), check_trace=False)


def test_what_a_test_model_generates_depends_on_its_prompt():
    # Answers that were all alike would hide what goes wrong here.
    model = patched(**SETTINGS["window"])
    answers = {tuple(answer(model, prompt(9, seed))[0, 9:].tolist()) for seed in range(5)}
    assert len(answers) > 2
