"""Contexts as files: the same answers after loading, one size for all lengths, and nobody else's states."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, CheckpointError, UnsupportedError
from hf_linear_attn.patching import encode_context, load_context

from .checks import Subject, left_padding, patched, some
from .zoo import tiny_model

SETTINGS = some("plain", "window", "kept", "retained", "mixed", "gated_delta")


@pytest.fixture(params=SETTINGS)
def subject(request):
    return Subject(patched(tiny_model("causal", "llama"), **SETTINGS[request.param]), "causal")


@pytest.fixture
def plain():
    return Subject(patch_model(tiny_model("causal", "llama"), "elu"), "causal")


def held_in(path):
    """Return a file's metadata and tensors."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["about"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def answer(subject, question, **kwargs):
    return subject.generate(question, **kwargs)[:, question.shape[1] :]


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_answers_after_loading_equal_answers_after_reading(subject, tmp_path, chunk_size):
    text, question = subject.tokens(13), subject.tokens(4, seed=1)
    mask = left_padding(text, 6)
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


@pytest.mark.parametrize("architecture", ["bart", "hunyuan_v1_moe"])
def test_other_modules_of_a_layers_number_do_not_hide_its_state(architecture, tmp_path):
    """Cross-attention has the number of the self-attention before it, and so has a router."""
    subject = Subject(patch_model(tiny_model("causal", architecture), "elu", window=3), "causal")
    text, question = subject.tokens(13), subject.tokens(4, seed=1)
    context = encode_context(subject.model, text)
    context.save(tmp_path / "text.safetensors")
    loaded = load_context(tmp_path / "text.safetensors", subject.model)
    assert loaded.nbytes == context.nbytes
    assert torch.equal(answer(subject, question, cache=loaded.copy()), answer(subject, question, cache=context.copy()))


def test_a_mask_is_of_the_question_or_of_text_and_question(subject):
    text, question = subject.tokens(13), subject.tokens(4, seed=1)
    mask, own = left_padding(text, 6), torch.ones_like(question)
    context = encode_context(subject.model, text * mask, mask)
    expected = answer(subject, question, cache=context.copy())
    whole = torch.cat([mask, own], 1)
    for given in (own, whole, whole.bool()):
        assert torch.equal(answer(subject, question, cache=context.copy(), attention_mask=given), expected)
    for wrong in (whole[:, 1:], torch.ones_like(whole)):
        with pytest.raises(ArgumentError, match=r"`attention_mask` must cover the 4 new tokens, or begin with the con"):
            answer(subject, question, cache=context.copy(), attention_mask=wrong)


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


def test_a_context_must_have_a_row_for_each_input(plain):
    context = encode_context(plain.model, plain.tokens(9, rows=1))
    with pytest.raises(ArgumentError, match=r"`cache` must hold a context for each of the 3 inputs, got 1"):
        answer(plain, plain.tokens(4, rows=3), cache=context.copy())


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_is_handed_nothing_as_long_as_the_text(subject, options, padded):
    text, question = subject.tokens(40), subject.tokens(4, seed=1)
    mask = left_padding(text, 6 if padded else 0)
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
    with pytest.raises(CheckpointError, match=r"`path` must hold what was saved, got '.*text.safetensors'"):
        load_context(path, plain.model)
    path.write_bytes(whole)
    about, tensors = held_in(path)
    save_file(tensors, path, metadata={"about": json.dumps(about | {"format_version": 99})})
    with pytest.raises(CheckpointError, match=r"`format_version` must be at most 4, got 99"):
        load_context(path, plain.model)
    for changes in ({"format_version": 4, "length": 8}, {"format_version": 3}, {"format_version": 4, "surprise": 1}):
        save_file(tensors, path, metadata={"about": json.dumps(about | changes)})
        with pytest.raises(CheckpointError, match=r"`path` must hold what was saved"):
            load_context(path, plain.model)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"`path` must hold a saved context"):
        load_context(path, plain.model)
    with pytest.raises(CheckpointError, match=r"`path` must be a whole safetensors file"):
        load_context(tmp_path / "nowhere", plain.model)
    with pytest.raises(CheckpointError, match=r"`path` must be a file, got '.*It is a folder"):
        load_context(tmp_path, plain.model)


@pytest.mark.parametrize("step", [pytest.param(37, id="some"), pytest.param(1, id="all", marks=pytest.mark.optional)])
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path, step):
    """The header holds names, types, shapes and metadata; layers share tensors in it, and one text is padded."""
    settings = {"feature_map": "elu", "window": 3, "sinks": 2, "rotary": "undo"}
    subject = Subject(patched(tiny_model("causal", "llama"), **settings), "causal")
    text, question, path = subject.tokens(13), subject.tokens(4, seed=1), tmp_path / "text.safetensors"
    mask = left_padding(text, 6)
    context = encode_context(subject.model, text * mask, mask)
    context.save(path)
    whole, expected = path.read_bytes(), answer(subject, question, cache=context.copy())
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for bit in (*range(0, 8 * header, step), *range(8 * header, 8 * len(whole), 37 * step)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            loaded = load_context(path, subject.model)
        except CheckpointError:
            refused += 1
        else:
            assert torch.equal(answer(subject, question, cache=loaded.copy()), expected), bit
    assert refused > 8 * header // step


def test_damaged_metadata_of_earlier_versions_are_refused(tmp_path):
    """Their checksum is of the tensors alone."""
    for name in ("context.safetensors", "config.json", "model.safetensors"):
        shutil.copy(Path(__file__).parent / "saved" / "shared" / name, tmp_path / name)
    model, path = from_pretrained(tmp_path), tmp_path / "context.safetensors"
    about, tensors = held_in(path)
    assert about["format_version"] < 4
    load_context(path, model)
    for name, value in (("length", "25"), ("length", None), ("same", ["x"]), ("same", {"x": "y"}), ("padded", 3)):
        save_file(tensors, path, metadata={"about": json.dumps(about | {name: value})})
        with pytest.raises(CheckpointError, match="`path` must hold what was saved"):
            load_context(path, model)
    save_file(tensors, path, metadata={"about": json.dumps(about | {"format_version": 2})})
    with pytest.raises(CheckpointError, match=r"`path` must hold the states of this model's layers.*KeyError"):
        load_context(path, model)


def test_a_context_is_written_whole_or_not_at_all(plain, tmp_path, full_disk):
    path = tmp_path / "text.safetensors"
    encode_context(plain.model, plain.tokens(9)).save(path)
    first = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    encode_context(plain.model, plain.tokens(7)).save(tmp_path / "link")
    assert len(load_context(path, plain.model)) == 7
    assert (tmp_path / "link").is_symlink()
    other = encode_context(plain.model, plain.tokens(9))
    path.write_bytes(first)
    with full_disk(1000), pytest.raises(CheckpointError, match="`path` must be a file that can be written"):
        other.save(path)
    assert path.read_bytes() == first
    assert sorted(x.name for x in tmp_path.iterdir()) == ["link", "text.safetensors"]
    with pytest.raises(CheckpointError, match=r"`path` must be a file, got .*It is a folder: name a file in it"):
        other.save(tmp_path)


TEXT = torch.arange(3, 12)[None]


def masked(*places):
    mask = torch.ones_like(TEXT)
    mask[0, list(places)] = 0
    return mask


RIGHT = r"`attention_mask` must be padded on the left, got 'padding on the right' \(row 0\)\. .*padding_side='left'"
BETWEEN = r"`attention_mask` must be padded on the left, got 'padding between its tokens' \(row 0\)"
SHAPE = r"`attention_mask` must have the shape \[B, T\] = \(1, 9\) of input_ids, got "
VALUES = r"`attention_mask` must be 1 for a real token and 0 for padding, got -1"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chunk_size": 0}, ArgumentError, r"`chunk_size` must be at least 1, or None, got 0"),
        ({"chunk_size": "8"}, ArgumentTypeError, r"`chunk_size` must be a whole number or None, got '8'"),
        ({"chunk_size": 1.5}, ArgumentTypeError, r"`chunk_size` must be a whole number or None, got 1\.5"),
        ({"model": None}, ArgumentError, r"`model` must be patched, got 'NoneType'"),
        ({"input_ids": TEXT[0]}, ArgumentError, r"`input_ids` must be texts \[B, T\] .*got \(9,\)\. .*ids\[None\]"),
        ({"input_ids": TEXT[:, :0]}, ArgumentError, r"`input_ids` must be texts .* at least 1 token, got \(1, 0\)"),
        ({"input_ids": [3, 4]}, ArgumentTypeError, r"`input_ids` must be a tensor, got 'list'\. Tokenise with ret"),
        ({"input_ids": [[3, 4]]}, ArgumentTypeError, r"`input_ids` must be a tensor, got 'list'"),
        ({"input_ids": TEXT.float()}, ArgumentTypeError, r"`input_ids` must be int64 or int32, got torch.float32"),
        ({"attention_mask": [[1] * 9]}, ArgumentTypeError, r"`attention_mask` must be a tensor, got 'list'"),
        ({"attention_mask": masked(7, 8)}, ArgumentError, RIGHT),
        ({"attention_mask": masked(4)}, ArgumentError, BETWEEN),
        ({"attention_mask": masked()[0]}, ArgumentError, SHAPE),
        ({"attention_mask": masked()[:, 1:]}, ArgumentError, SHAPE),
        ({"attention_mask": masked() - 2}, ArgumentError, VALUES),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(plain, arguments, error, message):
    with pytest.raises(error, match=message) as it:
        encode_context(**{"model": plain.model, "input_ids": TEXT} | arguments)
    assert "\n" not in str(it.value)


def test_bad_paths_and_copies_are_refused(plain, tmp_path):
    context = encode_context(plain.model, TEXT)
    for path in (None, 3):
        with pytest.raises(ArgumentTypeError, match=f"`path` must be a text or a path, got {path}"):
            load_context(path, plain.model)
        with pytest.raises(ArgumentTypeError, match=f"`path` must be a text or a path, got {path}"):
            context.save(path)
    with pytest.raises(ArgumentError, match="`model` must be patched, got 'NoneType'"):
        load_context("text.safetensors", None)
    context.save(tmp_path / "made" / "text.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"`path` must be a file that can be written"):
        context.save(tmp_path / "file" / "text.safetensors")
    for repeats in (0, -1):
        with pytest.raises(ArgumentError, match=f"`repeats` must be at least 1, got {repeats}"):
            context.copy(repeats)
    for repeats in (1.5, "2"):
        with pytest.raises(ArgumentTypeError, match="`repeats` must be a whole number"):
            context.copy(repeats)
    for mask in ([[1, 1]], torch.ones(2), torch.ones(2, 2)):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="`attention_mask` must "):
            answer(plain, TEXT[:, :2], cache=context.copy(), attention_mask=mask)


def test_encoder_decoders_are_refused():
    with pytest.raises(UnsupportedError, match=r"`model` must be a decoder-only model, got 'BartFor"):
        encode_context(patch_model(tiny_model("seq2seq", "bart"), "elu"), TEXT)
