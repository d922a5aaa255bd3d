"""Runs that could go wrong without a word: full disks, launchers that start too few, lengths that teach nothing."""

import logging

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from accelerate import PartialState
from transformers import PreTrainedTokenizerFast

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.models import check_lengths
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.files import whole_folder
from hf_linear_attn.loading import process_state
from tests.distill.tiny import byte_tokenizer, tiny_teacher
from tests.distill.workers import make_data

SHORT = {
    "window": 4,
    "sinks": 1,
    "block_tokens": 16,
    "rows": 1,
    "transfer_steps": 1,
    "distill_steps": 2,
    "heldout_rows": 0,
    "progress": False,
}


def run(folder):
    return distill(
        DistillationSettings(**SHORT, output_dir=str(folder)),
        teacher=tiny_teacher(),
        student=patch_model(tiny_teacher(), "hedgehog", window=4, sinks=1),
        tokenizer=byte_tokenizer(),
        data=make_data(),
    )


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def no_room(*args, **kwargs):
    raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_student_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole").student.state_dict()
    places = [
        (transformers.modeling_utils, "safe_save_file", no_room),
        (PreTrainedTokenizerFast, "save_pretrained", full_disk),
    ]
    for number, (owner, name, fails) in enumerate(places):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            with pytest.raises(
                CheckpointError, match=r"`output_dir` must have room for the model, .*make room and run"
            ):
                run(folder)
        assert {path.name for path in folder.iterdir()} <= {".lock", "checkpoints", "distillation.json", "log.jsonl"}
        # What was learned is in the checkpoints: the same command goes on.
        found = run(folder).student.state_dict()
        assert all(torch.equal(found[key], whole[key]) for key in whole)
        assert from_pretrained(folder).state_dict().keys() == whole.keys()


def save_and(fails, folder):
    with whole_folder(folder) as temporary:
        (temporary / "config.json").write_text("new")
        fails()


def test_a_folder_that_was_there_before_stays_as_it_was(tmp_path):
    (tmp_path / "config.json").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"`output_dir` must have room"):
        save_and(full_disk, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "old", "mine.txt": "mine"}
    with whole_folder(tmp_path) as temporary:
        (temporary / "config.json").write_text("new")
        (temporary / "model.safetensors").write_text("weights")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"config.json": "new", "model.safetensors": "weights", "mine.txt": "mine"}


def test_other_errors_while_saving_are_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(ZeroDivisionError):
        save_and(lambda: 1 / 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sequences_within_the_window_are_refused():
    settings = DistillationSettings(window=64, sinks=4, block_tokens=16, rows=4, length_factors=[1, 4])
    with pytest.raises(
        ArgumentError, match=r"`block_tokens` must reach beyond the window and its sinks, 68 tokens, got"
    ):
        check_lengths(settings, tiny_teacher())
    check_lengths(settings.with_changes(block_tokens=18), tiny_teacher())
    check_lengths(settings.with_changes(window=None, sinks=0), tiny_teacher())
    check_lengths(settings.with_changes(mix="window", stages=["distill"]), tiny_teacher())


def test_short_sequences_and_unseen_positions_are_named(caplog):
    settings = DistillationSettings(window=20, sinks=4, block_tokens=16, rows=4, length_factors=[1, 4])
    with caplog.at_level(logging.WARNING):
        check_lengths(settings, tiny_teacher(max_position_embeddings=64))
    assert [record.getMessage() for record in caplog.records] == [
        "sequences of 16 tokens end within the window and its sinks: only longer ones teach the linear branch"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_lengths(settings.with_changes(block_tokens=32), tiny_teacher(max_position_embeddings=64))
    assert [record.getMessage() for record in caplog.records] == [
        "sequences of 128 tokens reach beyond the 64 positions that LlamaForCausalLM was trained on: what it says "
        "there, and what is learned from it, is not to be trusted"
    ]


@pytest.fixture
def launched(monkeypatch):
    """Forget what Accelerate knows of this process; yield a way to set what a launcher sets."""
    before = dict(PartialState._shared_state)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)

    def launch(**variables):
        PartialState._shared_state.clear()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield launch
    PartialState._shared_state.clear()
    PartialState._shared_state.update(before)


def test_a_launcher_that_starts_one_process_of_several_is_refused(launched):
    # As `accelerate launch --cpu --num_processes 2` leaves them.
    launched(ACCELERATE_USE_CPU="True", MASTER_ADDR="127.0.0.1", ACCELERATE_MIXED_PRECISION="no")
    with pytest.raises(ArgumentError, match=r"`num_processes` must be 1.*got 'several'.*accelerate/cpu.yaml"):
        process_state()


def test_a_launcher_of_one_process_is_taken(launched, monkeypatch):
    launched(ACCELERATE_USE_CPU="True", ACCELERATE_MIXED_PRECISION="no")
    assert process_state().num_processes == 1
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    launched(MASTER_ADDR="127.0.0.1")
    assert process_state().num_processes == 1


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = type("State", (), {"num_processes": 1})()
    monkeypatch.setattr("hf_linear_attn.loading.PartialState", lambda **_: state)
    with pytest.raises(ArgumentError, match=r"`num_processes` must be 1, as the launcher .*got 2\. Start"):
        process_state()
