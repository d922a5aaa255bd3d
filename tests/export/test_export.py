"""Exports as programs of ``torch.export``, and what any export refuses."""

import gc
import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from hf_linear_attn.cli import main
from hf_linear_attn.errors import HFLinearAttnError
from hf_linear_attn.export import ExportSettings, export_model
from hf_linear_attn.layers import RULES
from hf_linear_attn.layers.rules.additive import Additive
from tests.evaluation.helpers import EOS
from tests.export.students import generated, prompts, save, softmax, student, written_alone

OURS = ("hf_linear_attn", "transformers")


def refused(*arguments, status=2):
    with pytest.raises(SystemExit) as end:
        main(["export", *map(str, arguments)])
    assert end.value.code == status


SLOW = [pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("recommended", "kept_window", "kept_learned")]


@pytest.mark.parametrize("recipe", [*SLOW, "gated_delta"])
def test_a_program_writes_what_the_model_writes_where_the_package_is_not(recipe, tmp_path, capsys):
    model = student("llama", recipe, depth=1)
    save(model, tmp_path / "student")
    main(["export", str(tmp_path / "student"), "--format", "torch"])
    assert "student-torch" in capsys.readouterr().out
    folder = tmp_path / "student-torch"
    texts = prompts(5)
    assert written_alone(folder / "example.py", texts, OURS) == [generated(model, text) for text in texts]
    names = {"example.py", "export.json", "model.pt2", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} >= names

    program = torch.export.load(folder / "model.pt2")
    assert not [node for node in program.graph.nodes if "hf_linear_attn" in str(node.target)]
    about = json.loads((folder / "export.json").read_text())
    assert about["eos_token_id"] == [EOS]
    check_padding(program.module(), model, about)


def check_padding(program, model, about):
    """A padded row in pieces gives what the row alone gives at once; the states have the size they began with."""
    ids = torch.tensor(prompts(2, 40)[0] * 30)[None, :60]
    alone = model(ids[:, 7:], use_cache=False).logits
    both, mask = ids.repeat(2, 1), torch.ones(2, 60, dtype=torch.long)
    mask[1, :7], both[1, :7] = 0, 5
    sizes = [[2 if size == "rows" else size for size in state["shape"]] for state in about["states"]]
    states = [torch.zeros(n, dtype=getattr(torch, x["dtype"])) for n, x in zip(sizes, about["states"], strict=True)]
    found = []
    for a, b in [(0, 3), (3, 11), (11, 12), (12, 59), (59, 60)]:
        logits, *states = program(both[:, a:b], mask[:, a:b], *states)
        found.append(logits)
        assert [list(x.shape) for x in states] == sizes
    found = torch.cat(found, 1)
    torch.testing.assert_close(found[1:, 7:], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[:1], model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def elu(tmp_path_factory):
    return save(student("llama", "elu", depth=1), tmp_path_factory.mktemp("elu") / "student")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--opset", "17"], "`opset` must be 18 or newer, got 17"),
        (["--format", "torch", "--opset", "18"], "`opset` must be left out"),
        (["--format", "tflite"], "`format` must be a known choice"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_line(elu, arguments, message, tmp_path, capsys):
    refused(elu, *arguments, "--output-dir", tmp_path / "out")
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(find_spec("onnxscript") is not None, reason="what it would lack is here")
def test_packages_that_are_missing_are_named(elu, tmp_path, capsys):
    refused(elu, "--output-dir", tmp_path / "out")
    assert "hf_linear_attn[export]" in capsys.readouterr().err


def test_no_model_is_written_over(elu, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in elu.iterdir()}
    refused(elu, "--format", "torch", "--output-dir", elu, "--overwrite")
    refused(elu, "--format", "torch", "--output-dir", elu / "exported")
    assert "`output_dir` must be apart from `model`" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in elu.iterdir()} == before
    (tmp_path / "mine.txt").write_text("mine")
    refused(elu, "--format", "torch", "--output-dir", tmp_path)
    assert "mine.txt" in capsys.readouterr().err


def test_a_model_without_a_converted_layer_is_refused(tmp_path, capsys):
    save(softmax("llama", 1), tmp_path / "softmax", tokenizer=False)
    refused(tmp_path / "softmax", "--format", "torch")
    error = capsys.readouterr().err
    assert "this one is softmax" in error
    assert "hf-linear-attn distill" in error


def test_layers_that_keep_their_keys_are_named(tmp_path):
    save(student("llama", "elu", layers=[1]), tmp_path / "half", tokenizer=False)
    with pytest.raises(HFLinearAttnError, match=r"layers \[0\] keep something else.*layers='all'"):
        export_model(ExportSettings(str(tmp_path / "half"), "torch"))
    assert not list(tmp_path.glob("half-torch/*"))


def test_a_rule_that_no_graph_can_hold_is_named(tmp_path, monkeypatch):
    class Moody(Additive):
        name = "moody"

        def read(self, call, state):
            found = super().read(call, state)
            return found if float(call.v.sum()) > 0 else found._replace(o=-found.o)

    monkeypatch.setitem(RULES, "moody", Moody)
    save(student("llama", "elu", depth=1, update_rule="moody"), tmp_path / "moody", tokenizer=False)
    with pytest.raises(HFLinearAttnError, match=r"update_rule='moody'.*without branches on values"):
        export_model(ExportSettings(str(tmp_path / "moody"), "torch"))


def test_a_full_disk_ends_in_a_line(elu, tmp_path, capsys, full_disk):
    with full_disk(10000):
        refused(elu, "--format", "torch", "--output-dir", tmp_path / "out")
        # What torch's own writer leaves unfinished would end the process here.
        gc.collect()
    assert "`output_dir` must have room for the model" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["model.pt2", "export.json"])
def test_a_kill_leaves_no_half_file(elu, moment, tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "hf_linear_attn.cli", "export", elu, "--format", "torch", "--output-dir", folder]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (folder / ".saving.tmp" / moment).exists():
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = {path.name for path in folder.iterdir()} - {".saving.tmp"}
    assert not left or "model.pt2" in left
    main(list(map(str, command[3:])))
    assert not (folder / ".saving.tmp").exists()
    texts = prompts(1)
    assert len(written_alone(folder / "example.py", texts, OURS)[0]) > 0
