"""The script that trains the embedded teacher: a smoke run, a kill, and the yardstick it is measured against."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_teacher  # noqa: E402
from ngram_baseline import NgramModel  # noqa: E402

# Two runs of about ten seconds each on a free core: a machine that is busy may take long.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCALE = 0.0004
SMALL = ["--steps-scale", str(SCALE), "--max-documents", "4", "--samples", "1", "--lengths", "256", "--log-every", "1"]


KILLED = """
import os, runpy, signal, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
from pathlib import Path
moved = Path.replace

def replace_and_die(self, target):
    found = moved(self, target)
    if Path(target).name == "checkpoint.pt":
        os.kill(os.getpid(), signal.SIGKILL)
    return found

Path.replace = replace_and_die
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(folder, *extra):
    script = str(EXAMPLES / "train_teacher.py")
    folders = ["--run-dir", str(folder), "--output-dir", str(folder / "teacher")]
    return [sys.executable, script, *folders, *SMALL, *extra]


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """Kill a run after its first checkpoint, then let it finish."""
    folder = tmp_path_factory.mktemp("run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    # It kills itself, as `kill -9` does: watched from outside, it might be done before it is noticed.
    script, *arguments = command(folder, "--save-every-s", "0")[1:]
    run = subprocess.run([sys.executable, "-c", KILLED, script, *arguments], env=environment, check=False)
    assert run.returncode == -signal.SIGKILL
    first = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
    subprocess.run(command(folder), env=environment, check=True, stderr=subprocess.DEVNULL)
    return folder, first


def test_a_killed_run_goes_on_and_exports_a_loadable_model(killed_and_resumed):
    folder, first = killed_and_resumed
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert 1 <= first < state["step"] == train_teacher.total_steps(SCALE)
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    ids = tokenizer("x = 12", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert torch.equal(model.state_dict()["model.norm.weight"], state["model"]["model.norm.weight"])


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(killed_and_resumed, monkeypatch):
    folder, _ = killed_and_resumed
    straight = folder / "straight"
    arguments = command(straight)[2:]
    monkeypatch.setattr(sys, "argv", ["train_teacher.py", *arguments])
    monkeypatch.setattr(train_teacher, "export", lambda args: None)
    train_teacher.main()
    expected = torch.load(straight / "checkpoint.pt", weights_only=True)["model"]
    resumed = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    # Only the order in which a CPU sums may differ between two processes.
    for name, weight in expected.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-4, atol=1e-5)


def test_larger_teachers_read_further_text_and_take_batches_from_other_processes(tmp_path, monkeypatch):
    (tmp_path / "text" / "package").mkdir(parents=True)
    (tmp_path / "text" / "package" / "a.py").write_text("alpha = 1\n" * 50)
    (tmp_path / "text" / "b.md").write_text("# beta\n" * 50)
    (tmp_path / "text" / "b.copy.md").write_text("# beta\n" * 50)
    (tmp_path / "text" / "c.json").write_text("{}")
    assert train_teacher.further_documents([tmp_path / "text"]) == ["# beta\n" * 50, "alpha = 1\n" * 50]
    monkeypatch.setattr(train_teacher, "load_stdlib_documents", lambda split: ["x = 1\n" * 400])
    monkeypatch.setattr(train_teacher, "export", lambda args: None)
    size = ["--width", "64", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "32"]
    size += ["--vocab-size", "300"]
    weights = []
    for workers in ("0", "2"):
        folder = tmp_path / workers
        arguments = ["--run-dir", str(folder), "--output-dir", str(folder / "teacher"), *SMALL, *size]
        arguments += ["--text", str(tmp_path / "text"), "--tokens-scale", "2", "--workers", workers]
        monkeypatch.setattr(sys, "argv", ["train_teacher.py", *arguments])
        train_teacher.main()
        weights.append(torch.load(folder / "checkpoint.pt", weights_only=True)["model"])
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert log[0]["tokens"] == 2 * train_teacher.STAGES[0].tokens_per_step
    assert weights[0]["model.embed_tokens.weight"].shape == (300, 64)
    assert weights[0]["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_the_card_and_the_log_hold_the_measured_figures(killed_and_resumed):
    folder, _ = killed_and_resumed
    lines = [json.loads(line) for line in (folder / "teacher" / "training_log.jsonl").read_text().splitlines()]
    measured = lines[-1]
    card = (folder / "teacher" / "README.md").read_text()
    assert f"{measured['bits_per_byte']:.3f}" in card
    assert f"{measured['bits_per_byte_5gram']:.3f}" in card
    assert f"{measured['parameters']:,}" in card
    assert [line["step"] for line in lines[:-1]] == list(range(1, measured["step"] + 1))
    assert {line["stage"] for line in lines[:-1]} <= {stage.name for stage in train_teacher.STAGES}


def test_digits_are_single_tokens_and_text_survives(killed_and_resumed):
    tokenizer = AutoTokenizer.from_pretrained(killed_and_resumed[0] / "teacher")
    text = "def f(x):\n    return 12345 + x  # é\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert len(tokenizer("12345", add_special_tokens=False)["input_ids"]) == 5


def test_the_first_layer_attends_to_the_previous_token_before_training(killed_and_resumed):
    tokenizer = AutoTokenizer.from_pretrained(killed_and_resumed[0] / "teacher")
    model = train_teacher.make_model(tokenizer, seed=1)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, len(tokenizer), (2, 64), generator=torch.Generator().manual_seed(0))
    weights = model(ids, output_attentions=True).attentions[0]
    previous = weights.diagonal(offset=-1, dim1=2, dim2=3).mean(dim=(0, 2))
    assert previous[0::2].min() > 0.7
    assert previous[1::2].max() < 0.3


def test_positions_leap_within_the_longest_context_and_each_token_still_sees_all_before_it(killed_and_resumed):
    tokenizer = AutoTokenizer.from_pretrained(killed_and_resumed[0] / "teacher")
    data = train_teacher.Data(tokenizer, ["x = 1\n" * 4000], seed=0)
    last = train_teacher.total_steps(1.0, train_teacher.STAGES[:-1])
    batches = [data.batch(step, 1.0) for step in range(last, last + 12)]
    steps = torch.cat([batch.positions.diff(dim=1).flatten() for batch in batches])
    ends = torch.stack([row[-1] for batch in batches for row in batch.positions])
    assert steps.min() == 1
    assert steps.max() > 256
    short = [batch.positions for batch in batches if batch.positions.shape[1] == train_teacher.TRAINED_LENGTH]
    assert max(positions.max() for positions in short) > train_teacher.LONGEST_LENGTH // 2
    assert ends.max() < train_teacher.LONGEST_LENGTH
    assert 0.2 < (ends == train_teacher.TRAINED_LENGTH - 1).float().mean() < 0.8
    model = train_teacher.make_model(tokenizer, seed=1)
    ids = torch.randint(3, len(tokenizer), (1, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(16), torch.arange(1000, 1016)])[None]
    weights = torch.zeros(1, 32).index_fill_(1, torch.tensor([31]), 1.0)
    other = ids.index_fill(1, torch.tensor([3]), 3)
    losses = [train_teacher.weighted_loss(model, train_teacher.Batch(x, positions, weights)) for x in (ids, other)]
    assert losses[0] != losses[1], "a leap must not hide what is before it"


def test_rows_mark_as_asked_what_earlier_tokens_determine(killed_and_resumed):
    tokenizer = AutoTokenizer.from_pretrained(killed_and_resumed[0] / "teacher")
    data = train_teacher.Data(tokenizer, ["x = 1\n" * 400], seed=0)
    for step in range(40):
        rng = train_teacher.random.Random(step)
        row, asked = data._repeat_row(256, rng)
        period = asked.index(True) - 1
        assert row[1 + period :] == row[1:-period]
        row, asked = data._pairs_row(256, rng)
        assert len(row) == len(asked) <= 256
        assert any(asked)
        row, asked = data._numbers_row(256, rng)
        assert len(row) == len(asked) == 256
        said = tokenizer.decode(row)
        answers = tokenizer.decode([token for token, wanted in zip(row, asked, strict=True) if wanted]).split(".\n")
        assert all(said.count(f" {value.strip()}.") == 2 for value in answers if value)
        row, asked = data._task_row(256, rng)
        assert len(row) == len(asked) <= 256
        assert any(asked)


def test_ngram_probabilities_sum_to_one_after_any_history():
    model = NgramModel(["abracadabra abracadabra", "abba"], order=3)
    for history in (b"ab", b"xx", b"zb"):
        grams = np.array([int.from_bytes(history + bytes([byte]), "big") for byte in range(256)], dtype=np.uint64)
        assert model._probability(grams, 0).sum() == pytest.approx(1.0, abs=1e-9)


def test_ngram_matches_kneser_ney_worked_by_hand():
    # "aab" has the bigrams ^a, aa and ab, once each: no count of two, so the discount is 0.5. As continuations a
    # counts two and b one: the discount is 1 / (1 + 2 * 1).
    model = NgramModel(["aab"], order=2)
    unigram_a = (2 - 1 / 3) / 3 + 1 / 3 * 2 / 3 / 256
    expected = (1 - 0.5) / 2 + 0.5 * 2 / 2 * unigram_a
    assert model.bits_per_byte(["a"]) == pytest.approx(-math.log2((1 - 0.5) / 1 + 0.5 * unigram_a))
    grams = np.array([int.from_bytes(b"aa", "big")], dtype=np.uint64)
    assert model._probability(grams, 0)[0] == pytest.approx(expected)


def test_ngram_order_is_checked():
    with pytest.raises(ValueError, match=r"`order` must lie in 1\.\.7, got 9"):
        NgramModel(["a"], order=9)
