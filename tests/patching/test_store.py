"""Stored contexts: what was read before gives what reading it all gives, to the bit, whoever read it or died of it."""

import multiprocessing
import os
import random
import time

import pytest
import torch

from hf_linear_attn import ContextStore, encode_context, patch_model
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, CheckpointError
from hf_linear_attn.patching import store as module
from hf_linear_attn.patching.call_cache import NAME
from hf_linear_attn.patching.context_file import UNFINISHED

from .checks import Subject, some
from .zoo import tiny_model

SETTINGS = some("plain", "window", "kept", "retained") | {"mixed": {"feature_map": "elu", "window": 5, "layers": [1]}}
BLOCK = 4
pytestmark = pytest.mark.usefixtures("one_thread")


def patched(name="window"):
    return patch_model(tiny_model("causal", "llama"), **SETTINGS[name]).eval()


@torch.no_grad()
def logits_after(model, cache, ids):
    return model(ids[:, cache.get_seq_length() :], **{NAME: cache}).logits


@torch.no_grad()
def logits_from_scratch(model, ids):
    """Read a text in blocks of the store's size, without a store."""
    end = (ids.shape[1] - 1) // BLOCK * BLOCK
    if not end:
        return model(ids, use_cache=True).logits
    cache = encode_context(model, ids[:, :end], chunk_size=BLOCK).copy()
    return model(ids[:, end:], attention_mask=torch.ones_like(ids), **{NAME: cache}).logits


def draw(rng, known):
    """Draw a text that begins as one of those that are known, and know it."""
    old = rng.choice(known[-20:]) if known else []
    text = old[: rng.randrange(len(old) + 1)] + [rng.randrange(5, 60) for _ in range(rng.randrange(1, 12))]
    known.append(text[:40])
    return torch.tensor([known[-1]])


LOOKUPS = [
    ("window", 50),
    ("mixed", 12),
    pytest.param("plain", 1000, marks=pytest.mark.optional),
    pytest.param("window", 1000, marks=pytest.mark.optional),
    pytest.param("mixed", 1000, marks=pytest.mark.optional),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "number"), LOOKUPS)
def test_look_ups_equal_reading_from_scratch_to_the_bit(name, number, tmp_path, monkeypatch):
    """Prefixes overlap, and the folder is so small that states are removed all the while."""
    model, rng, known = patched(name), random.Random(number), []
    one = encode_context(model, torch.arange(5, 45)[None]).nbytes
    store, pieces = ContextStore(tmp_path, model, block_size=BLOCK, max_bytes=25 * one), []
    read = module.read_piece
    monkeypatch.setattr(module, "read_piece", lambda *args: pieces.append(args[-2:]) or read(*args))
    needed = 0
    for _ in range(number):
        ids = draw(rng, known)
        assert torch.equal(logits_after(model, store.longest(ids), ids), logits_from_scratch(model, ids))
        assert store.nbytes <= store.max_bytes
        needed += (ids.shape[1] - 1) // BLOCK
    assert 0 < len(pieces) < 0.8 * needed


@pytest.mark.parametrize("name", SETTINGS)
def test_what_follows_a_loaded_state_equals_what_follows_a_fresh_one(name, tmp_path):
    """Whether one token is left or several, and whether the sinks have been read or not."""
    model = patched(name)
    for length in range(BLOCK + 1, 4 * BLOCK + 2):
        ids = torch.arange(5, 5 + length)[None]
        ContextStore(tmp_path, model, block_size=BLOCK).longest(ids)
        found = ContextStore(tmp_path, model, block_size=BLOCK).longest(ids, read=False)
        assert found.get_seq_length() == (length - 1) // BLOCK * BLOCK
        assert torch.equal(logits_after(model, found, ids), logits_from_scratch(model, ids))


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_equal_those_after_reading_it_all(name, tmp_path):
    subject = Subject(patched(name), "causal")
    ids = subject.tokens(23, rows=1)
    whole = subject.generate(ids)
    for _ in range(2):
        store = ContextStore(tmp_path, subject.model, block_size=BLOCK)
        assert torch.equal(subject.generate(ids, cache=store.longest(ids)), whole)
        assert torch.equal(subject.generate(ids[0][None], cache=store.longest(ids[0])), whole)
    assert len(store) == 22 // BLOCK
    assert store.longest(ids[:, :BLOCK]).get_seq_length() == 0
    assert store.longest(ids[:, : BLOCK + 1], read=False).get_seq_length() == BLOCK


def test_without_reading_a_look_up_ends_where_the_folder_does(tmp_path):
    model = patched()
    ids = torch.arange(5, 35)[None]
    store = ContextStore(tmp_path, model, block_size=BLOCK)
    assert store.longest(ids, read=False).get_seq_length() == 0
    store.longest(ids[:, :14])
    assert store.longest(ids, read=False).get_seq_length() == 12
    other = ids.clone()
    other[0, 6] = 3
    assert store.longest(other, read=False).get_seq_length() == 4
    assert len(store) == 3


def test_states_of_another_model_or_block_size_are_not_found(tmp_path):
    ids = torch.arange(5, 35)[None]
    ContextStore(tmp_path, patched(), block_size=BLOCK).longest(ids)
    other = patched()
    next(other.parameters()).data += 0.1
    assert ContextStore(tmp_path, other, block_size=BLOCK).longest(ids, read=False).get_seq_length() == 0
    assert ContextStore(tmp_path, patched("plain"), block_size=BLOCK).longest(ids, read=False).get_seq_length() == 0
    assert ContextStore(tmp_path, patched(), block_size=8).longest(ids, read=False).get_seq_length() == 0


def test_a_damaged_file_is_ignored_with_a_warning_and_written_again(tmp_path, caplog):
    model, ids = patched(), torch.arange(5, 35)[None]
    store = ContextStore(tmp_path, model, block_size=BLOCK)
    expected = logits_after(model, store.longest(ids), ids)
    newest = max(tmp_path.glob("*/*.context"), key=lambda path: path.stat().st_mtime_ns)
    for damage in (lambda x: x[: len(x) // 2], lambda x: x[:-400] + bytes(200) + x[-200:], lambda x: b""):
        newest.write_bytes(damage(newest.read_bytes()))
        caplog.clear()
        assert torch.equal(logits_after(model, store.longest(ids), ids), expected)
        assert "a stored context is damaged, and read again" in caplog.text
        caplog.clear()
        assert store.longest(ids, read=False).get_seq_length() == 28
        assert not caplog.text


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    model = patched()
    texts = [torch.full((1, BLOCK + 1), token) for token in range(5, 9)]
    roomy = ContextStore(tmp_path / "measured", model, block_size=BLOCK)
    roomy.longest(texts[0])
    store = ContextStore(tmp_path, model, block_size=BLOCK, max_bytes=3 * roomy.nbytes)
    for age, text in enumerate(texts[:3]):
        store.longest(text)
        newest = max(store._held(), key=lambda held: held.used_s)
        os.utime(newest.path, (time.time() - 100 + age,) * 2)
    assert store.longest(texts[0], read=False).get_seq_length() == BLOCK
    store.longest(texts[3])
    assert [store.longest(text, read=False).get_seq_length() for text in texts] == [BLOCK, 0, BLOCK, BLOCK]


def test_a_state_beyond_all_bounds_is_not_kept_and_leftovers_go(tmp_path):
    model, ids = patched(), torch.arange(5, 15)[None]
    small = ContextStore(tmp_path, model, block_size=BLOCK, max_bytes=10)
    assert small.longest(ids).get_seq_length() == 8
    assert len(small) == 0
    for name, age in (("old", 2 * module.ABANDONED_S), ("young", 1.0)):
        path = tmp_path / "ab" / f"{name}{UNFINISHED}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    ContextStore(tmp_path, model, block_size=BLOCK).longest(ids)
    assert [path.stem for path in tmp_path.glob(f"*/*{UNFINISHED}")] == ["young"]


@pytest.mark.parametrize("setting", ["block_size", "max_bytes"])
def test_numbers_out_of_range_are_refused(tmp_path, setting):
    with pytest.raises(ArgumentError, match=f"`{setting}` must be at least 1, got 0"):
        ContextStore(tmp_path, patched(), **{setting: 0})
    for value in (1.5, "8", None):
        with pytest.raises(ArgumentTypeError, match=f"`{setting}` must be a whole number, got {value!r}"):
            ContextStore(tmp_path, patched(), **{setting: value})


def test_folders_that_are_none_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(ArgumentError, match=r"`folder` must be a folder, or one that can be made, got '.*Choose"):
            ContextStore(folder, patched())
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ArgumentTypeError, match="`folder` must be a text or a path, got None"):
        ContextStore(None, patched())


def test_a_folder_in_place_of_a_file_is_named_and_left_alone(tmp_path):
    model, ids = patched(), torch.arange(5, 35)[None]
    store = ContextStore(tmp_path, model, block_size=BLOCK)
    store.longest(ids)
    newest = max(tmp_path.glob("*/*.context"), key=lambda path: path.stat().st_mtime_ns)
    newest.unlink()
    newest.mkdir()
    (newest / "note").write_text("mine")
    for read in (True, False):
        with pytest.raises(CheckpointError, match=f"`path` must be a file, got '{newest}'. It is a folder"):
            store.longest(ids, read=read)
    assert len(store) == 28 // BLOCK - 1
    ContextStore(tmp_path, model, block_size=BLOCK, max_bytes=1).longest(ids[:, :BLOCK])
    assert (newest / "note").read_text() == "mine"


def test_several_texts_and_softmax_models_are_refused(tmp_path):
    store = ContextStore(tmp_path, patched())
    with pytest.raises(ArgumentError, match=r"`ids` must be one text, .* got \(2, 5\)"):
        store.longest(torch.ones(2, 5, dtype=torch.long))
    for ids in ([3, 4], [[3, 4]], "text", None):
        with pytest.raises(ArgumentTypeError, match=f"`ids` must be a tensor, got '{type(ids).__name__}'"):
            store.longest(ids)
    with pytest.raises(ArgumentTypeError, match=r"`ids` must be int64 or int32, got torch.float32"):
        store.longest(torch.ones(1, 5))
    with pytest.raises(ArgumentError, match="`model` must be patched"):
        ContextStore(tmp_path, tiny_model("causal", "llama"))


def fill(folder, seed, number):
    torch.set_num_threads(1)
    model, rng, known = patched(), random.Random(seed), []
    store = ContextStore(folder, model, block_size=BLOCK, max_bytes=300_000)
    for _ in range(number):
        store.longest(draw(rng, known))


@pytest.mark.timeout(3600)
# A child of `fork` inherits one thread alone, which is all it needs; starting anew would take ten seconds a kill.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.optional)])
def test_processes_that_are_killed_leave_nothing_damaged(kills, tmp_path, caplog):
    context, rng = multiprocessing.get_context("fork"), random.Random(0)
    steady = context.Process(target=fill, args=(tmp_path, 0, 10 * kills))
    steady.start()
    for kill in range(kills):
        # Both draw the same texts now and then, and write the same files.
        child = context.Process(target=fill, args=(tmp_path, kill % 3, 10_000))
        child.start()
        child.join(rng.uniform(0.05, 0.3))
        assert child.is_alive()
        child.kill()
        child.join()
    steady.join()
    assert steady.exitcode == 0
    model, drawn = patched(), random.Random(0)
    store, known = ContextStore(tmp_path, model, block_size=BLOCK, max_bytes=300_000), []
    assert len(store) > 5
    for _ in range(15):
        ids = draw(drawn, known)
        assert torch.equal(logits_after(model, store.longest(ids), ids), logits_from_scratch(model, ids))
    for held in store._held():
        module.read_context(held.path, model, store.fingerprint)
    assert "damaged" not in caplog.text
