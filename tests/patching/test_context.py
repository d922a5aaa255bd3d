"""Contexts as files: the same answers after loading, one size for all lengths, and nobody else's states."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError, CheckpointError, UnsupportedError
from hf_linear_attn.patching import encode_context, load_context
from hf_linear_attn.patching.call_cache import NAME

from .checks import Subject, patched
from .zoo import tiny_model

SETTINGS = {
    "plain": {"feature_map": "elu"},
    "window": {"feature_map": "hedgehog", "window": 3, "sinks": 2},
    "mixed": {"feature_map": "elu", "layers": [1]},
    "gated_delta": {"feature_map": "hedgehog", "window": 3, "sinks": 2, "update_rule": "gated_delta"},
}


@pytest.fixture(params=SETTINGS)
def subject(request):
    return Subject(patched(tiny_model("causal", "llama"), **SETTINGS[request.param]), "causal")


@pytest.fixture
def plain():
    return Subject(patch_model(tiny_model("causal", "llama"), "elu"), "causal")


def answer(subject, question, **kwargs):
    return subject.generate(question, **kwargs)[:, question.shape[1] :]


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_answers_after_loading_equal_answers_after_reading(subject, tmp_path, chunk_size):
    text, question = subject.tokens(13), subject.tokens(4, seed=1)
    mask = torch.ones_like(text)
    mask[1, :6] = 0
    text = text * mask
    full = torch.cat([mask, torch.ones_like(question)], 1)
    read = subject.generate(torch.cat([text, question], 1), attention_mask=full)[:, 17:]
    context = encode_context(subject.model, text, mask, chunk_size=chunk_size)
    assert len(context) == 13
    assert context.batch_size == 2
    assert torch.equal(answer(subject, question, cache=context.copy()), read)
    context.save(tmp_path / "text.safetensors")
    loaded = load_context(tmp_path / "text.safetensors", subject.model)
    for _ in range(2):
        assert torch.equal(answer(subject, question, cache=loaded.copy()), read)


def test_a_mask_is_of_the_question_or_of_text_and_question(subject):
    text, question = subject.tokens(13), subject.tokens(4, seed=1)
    mask, own = torch.ones_like(text), torch.ones_like(question)
    mask[1, :6] = 0
    context = encode_context(subject.model, text * mask, mask)
    expected = answer(subject, question, cache=context.copy())
    whole = torch.cat([mask, own], 1)
    for given in (own, whole, whole.bool()):
        assert torch.equal(answer(subject, question, cache=context.copy(), attention_mask=given), expected)
    for wrong in (whole[:, 1:], torch.ones_like(whole)):
        with pytest.raises(ArgumentError, match=r"`attention_mask` must cover the 4 new tokens, or begin with the con"):
            answer(subject, question, cache=context.copy(), attention_mask=wrong)


def test_one_text_is_saved_and_loaded(subject, tmp_path):
    text, question = subject.tokens(13, rows=1), subject.tokens(4, seed=1, rows=1)
    context = encode_context(subject.model, text)
    context.save(tmp_path / "text.safetensors")
    loaded = load_context(tmp_path / "text.safetensors", subject.model)
    answers = [answer(subject, question, cache=x.copy()) for x in (context, loaded)]
    assert torch.equal(*answers)


def test_several_questions_about_one_text(plain):
    text, questions = plain.tokens(9, rows=1), plain.tokens(4, seed=1, rows=3)
    context = encode_context(plain.model, text)
    together = answer(plain, questions, cache=context.copy(repeats=3))
    alone = [answer(plain, q[None], cache=context.copy()) for q in questions]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beams_after_a_context_are_those_after_its_text(subject, options):
    text, question = subject.tokens(13), subject.tokens(4, seed=1)
    context = encode_context(subject.model, text)
    read = subject.generate(torch.cat([text, question], 1), **options)[:, 17:]
    assert torch.equal(answer(subject, question, cache=context.copy(), **options), read)


def test_several_samples_after_a_context(subject):
    context = encode_context(subject.model, subject.tokens(13))
    question = subject.tokens(4, seed=1)
    options = {"do_sample": True, "num_return_sequences": 3, NAME: context.copy()}
    assert subject.generate(question, **options).shape[0] == 3 * len(question)


def test_a_context_must_have_a_row_for_each_input(plain):
    context = encode_context(plain.model, plain.tokens(9, rows=1))
    with pytest.raises(ArgumentError, match=r"`cache` must hold a context for each of the 3 inputs, got 1"):
        answer(plain, plain.tokens(4, rows=3), cache=context.copy())


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_is_handed_nothing_as_long_as_the_text(subject, options, padded):
    text, question = subject.tokens(40), subject.tokens(4, seed=1)
    mask = torch.ones_like(text)
    if padded:
        mask[1, :6] = 0
    context = encode_context(subject.model, text * mask, mask)
    sizes = []

    def record(module, args, kwargs):
        sizes.append(max(x.shape[-1] for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)))

    hook = subject.model.register_forward_pre_hook(record, with_kwargs=True)
    torch.manual_seed(0)
    found = answer(subject, question, cache=context.copy(), **options)
    hook.remove()
    assert len(sizes) > 3
    softmax_layers = subject.model.config.linear_attention["layers"] == [1]
    assert max(sizes[1:]) == 1 or softmax_layers
    full = torch.cat([mask, torch.ones_like(question)], 1)
    torch.manual_seed(0)
    read = subject.generate(torch.cat([text * mask, question], 1), attention_mask=full, **options)[:, 44:]
    assert torch.equal(found, read)


def test_the_size_does_not_depend_on_the_length(subject, tmp_path):
    sizes = []
    for tokens in (20, 100):
        path = tmp_path / f"{tokens}.safetensors"
        context = encode_context(subject.model, subject.tokens(tokens))
        context.save(path)
        sizes.append((context.nbytes, path.stat().st_size))
    softmax_layers = subject.model.config.linear_attention["layers"] == [1]
    # The header spells the length out.
    assert softmax_layers or (sizes[0][0] == sizes[1][0] and abs(sizes[0][1] - sizes[1][1]) <= 8)


def test_a_used_copy_is_refused(plain):
    context = encode_context(plain.model, plain.tokens(9))
    cache = context.copy()
    question = plain.tokens(3)
    plain.generate(question, cache=cache)
    with pytest.raises(ArgumentError, match=r"`cache` must be a fresh copy of a context of 9 tokens, got"):
        plain.generate(question, cache=cache)


def test_states_of_other_models_are_refused(plain, tmp_path):
    path = tmp_path / "text.safetensors"
    encode_context(plain.model, plain.tokens(9)).save(path)
    other = patch_model(tiny_model("causal", "llama"), "relu")
    with pytest.raises(CheckpointError, match=r"`model` must be the one that read this text"):
        load_context(path, other)
    changed = patch_model(tiny_model("causal", "llama"), "elu")
    with torch.no_grad():
        changed.model.layers[0].self_attn.q_proj.weight += 1
    with pytest.raises(CheckpointError, match=r"`model` must be the one that read this text"):
        load_context(path, changed)
    with pytest.raises(ArgumentError, match=r"`model` must be patched, got 'LlamaForCausalLM'"):
        load_context(path, tiny_model("causal", "llama"))


def test_damaged_files_are_refused(plain, tmp_path):
    path = tmp_path / "text.safetensors"
    encode_context(plain.model, plain.tokens(9)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"`path` must be a whole safetensors file"):
        load_context(path, plain.model)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"`path` must hold the tensors that were saved"):
        load_context(path, plain.model)
    path.write_bytes(whole)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"]) | {"format_version": 99}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={"about": json.dumps(about)})
    with pytest.raises(CheckpointError, match=r"`format_version` must be at most 3, got 99"):
        load_context(path, plain.model)
    about |= {"format_version": 3, "same": {"layers.1.0.near_turns": "layers.0.0.near_turns"}}
    save_file(tensors, path, metadata={"about": json.dumps(about)})
    with pytest.raises(CheckpointError, match=r"`path` must hold the tensors that were saved"):
        load_context(path, plain.model)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"`path` must hold a saved context"):
        load_context(path, plain.model)
    with pytest.raises(CheckpointError, match=r"`path` must be a whole safetensors file"):
        load_context(tmp_path / "nowhere", plain.model)


def test_bad_arguments_are_refused(plain):
    text = plain.tokens(5)
    with pytest.raises(ArgumentError, match=r"`chunk_size` must be at least 1, or None, got 0"):
        encode_context(plain.model, text, chunk_size=0)
    mask = torch.ones_like(text)
    mask[:, -1] = 0
    with pytest.raises(ArgumentError, match=r"`attention_mask` must be padded on the left and of shape"):
        encode_context(plain.model, text, mask)
    with pytest.raises(UnsupportedError, match=r"`model` must be a decoder-only model, got 'BartFor"):
        encode_context(patch_model(tiny_model("seq2seq", "bart"), "elu"), text)


def test_a_context_copies_without_its_original(plain):
    context = encode_context(plain.model, plain.tokens(9))
    cache, untouched = context.copy(), context.copy()
    plain.logits(plain.tokens(3), **{NAME: cache})
    assert untouched.get_seq_length() == 9
    assert isinstance(cache, DynamicCache)
    assert torch.equal(context.copy().layers[0].tensors["kv"], untouched.layers[0].tensors["kv"])
