"""Folders served by vLLM answer as Transformers' generate does; `make vllm` makes the environment, and runs this."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .folders import LENGTHS, NEW, answers, prompts, write

pytestmark = [
    pytest.mark.optional,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
ONES = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
TIGHT = {"enable_prefix_caching": True, "num_gpu_blocks_override": 8, "max_model_len": 512, **ONES}
PLAIN = [
    *(("llama", name) for name in ("plain", "key", "gate", "shared", "window", "undo", "mixed", "decay", "delta")),
    *(("llama", "gated_delta"), ("qwen3", "key"), ("qwen3", "mixed"), ("gpt2", "key"), ("gpt_neox", "key")),
]
EAGER = {f"{architecture}, {conversion}": (architecture, conversion, {}) for architecture, conversion in PLAIN} | {
    "llama, key, prefix caching": ("llama", "key", {"options": {"enable_prefix_caching": True}, "rounds": 2}),
    "llama, mixed, prefix caching": ("llama", "mixed", {"options": {"enable_prefix_caching": True}, "rounds": 2}),
    "llama, mixed, preempted": ("llama", "mixed", {"options": TIGHT, "every": 0, "lengths": (100,) * 8, "fewer": 0}),
    "llama, key, all at once": ("llama", "key", {"options": {"max_num_seqs": 9}, "every": 0}),
}
# Each in a process of its own, as all are: steps and drafts load Numba, and vLLM builds no engine where that was loaded
# before. As it looks through modules for its kernels, it takes `__dict__` of a wrapper of llvmlite's for a dictionary.
OTHERS = {
    "gpt_neox, plain, drafts": ("gpt_neox", "plain", {"options": {"speculative_config": NGRAM}}),
    "llama, kept": ("llama", "kept", {}),
    "llama, learned, prefix caching": (
        "llama",
        "learned",
        {"options": {"enable_prefix_caching": True}, "rounds": 2},
    ),
    "llama, key, compiled": ("llama", "key", {"options": {"enforce_eager": False}}),
    "llama, key, 2 ranks": ("llama", "key", {"options": {"tensor_parallel_size": 2}}),
    "llama, one key head, key, 2 ranks": ("llama, one key head", "key", {"options": {"tensor_parallel_size": 2}}),
}
ROWS = EAGER | OTHERS


class Served:
    """Folders that were written, what Transformers answers, and what vLLM did."""

    def __init__(self, root):
        self.root, self.known = root, {}

    def folder(self, architecture, conversion):
        path = self.root / f"{architecture}-{conversion}".replace(", ", "-").replace(" ", "-")
        return path if path.exists() else write(path, architecture, conversion)

    def expected(self, row):
        architecture, conversion, job = row
        key = architecture, conversion, job.get("lengths", LENGTHS)
        if key not in self.known:
            self.known[key] = answers(self.folder(architecture, conversion), prompts(key[2]))
        return self.known[key]

    def run(self, rows, **environment):
        jobs = {}
        for name, (architecture, conversion, job) in rows.items():
            given = {"folder": str(self.folder(architecture, conversion)), "new": NEW}
            jobs[name] = given | {"prompts": prompts(job.get("lengths", LENGTHS))} | job
        asked, answered = self.root / "jobs.json", self.root / "answers.json"
        asked.write_text(json.dumps(jobs))
        here = Path(__file__).parent
        own = {
            "VLLM_CACHE_ROOT": str(self.root / "cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(here / "worker.py"), str(asked), str(answered)]
        done = subprocess.run(command, env=os.environ | own | environment, capture_output=True, text=True, check=False)
        assert answered.exists(), done.stdout[-3000:] + done.stderr[-3000:]
        found = json.loads(answered.read_text())
        answered.unlink()
        # vLLM's own processes say what went wrong in their output only.
        return found, done.stdout + done.stderr


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def eager(served):
    return {name: served.run({name: row})[0][name] for name, row in EAGER.items()}


def check(served, row, found):
    assert "error" not in found, found["error"]
    expected, fewer = served.expected(row), row[2].get("fewer", 3)
    for answered in found["rounds"]:
        assert len(answered["tokens"]) == len(expected)
        for number, (got, (want, _)) in enumerate(zip(answered["tokens"], expected, strict=True)):
            assert got == want[: len(want) - fewer * number], f"prompt {number}"


@pytest.mark.parametrize("name", EAGER)
def test_tokens_equal_those_of_transformers(served, eager, name):
    check(served, EAGER[name], eager[name])
    first, last = eager[name]["rounds"][0], eager[name]["rounds"][-1]
    if "prefix" in name:
        assert first["cached"] == [0] * len(LENGTHS)
        assert last["cached"][-1] >= 1300
    assert bool(first["preempted"]) == ("preempted" in name)
    assert eager[name]["layers"] == (
        {"MambaSpec": 2, "FullAttentionSpec": 2} if ", mixed" in name else {"MambaSpec": 4}
    )


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_equal_those_of_transformers_in_processes_of_their_own(served, name):
    found, said = served.run({name: OTHERS[name]})
    assert name in found, said[-3000:]
    check(served, OTHERS[name], found[name])
    if "drafts" in name:
        assert found[name]["rounds"][0]["steps"] < 80


def test_in_bf16_tokens_differ_first_where_two_are_nearly_alike(served):
    """Weights are random, so that one other token changes all that follow."""
    row = ("llama", "key", {"options": {"dtype": "bfloat16"}})
    found, alike = served.run({"bf16": row})[0]["bf16"], []
    for got, (want, margin) in zip(found["rounds"][0]["tokens"], served.expected(row), strict=True):
        first = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), len(got))
        alike.append(first)
        # A margin of fp32's, whose median is 0.4: none that is large is overturned.
        assert first == len(got) or margin[first] < 0.6
    assert sorted(alike)[len(alike) // 2] >= 4


def damaged(folder, target, **changes):
    """Copy a folder with another config.json."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def test_what_cannot_be_served_is_refused_by_name(served, tmp_path):
    folder = served.folder("llama", "key")
    settings = json.loads((folder / "config.json").read_text())["linear_attention"]
    plain = {"folder": str(folder)}
    refused = {
        "newer": ({"folder": damaged(folder, tmp_path / "newer", linear_attention=settings | {"format_version": 9})},
                  "`format_version` must be at most 1, got 9"),
        "softmax": ({"folder": damaged(folder, tmp_path / "softmax", linear_attention=None)},
                    "`linear_attention` must stand in config.json of a converted folder"),
        "layers": ({"folder": damaged(folder, tmp_path / "layers", linear_attention=settings | {"layers": [1, 7]})},
                   "index out of range|`layers` must be indices"),
        "lora": (plain | {"options": {"enable_lora": True}}, "`enable_lora` must be off"),
        "drafts": (plain | {"options": {"speculative_config": NGRAM, "enable_prefix_caching": True}},
                   "`enable_prefix_caching` must be off where tokens are drafted"),
    }  # fmt: skip
    rows = {name: ("llama", "key", job | {"lengths": (3,)}) for name, (job, _) in refused.items()}
    found, said = served.run(rows)
    for name, (_, error) in refused.items():
        assert re.search(error, found[name].get("error", "") + said), (name, found[name])


def test_another_version_is_refused_by_name_and_other_models_are_served(served, tmp_path):
    """A version that is not supported is pretended in every process, those of vLLM included."""
    (tmp_path / "sitecustomize.py").write_text(
        "from hf_linear_attn.serving.vllm import checks\nchecks.SUPPORTED_VERSIONS = ('0.1.0',)\n"
    )
    row = ("llama", "key", {"lengths": (3,)})
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found, said = served.run({"key": row}, PYTHONPATH=path)
    assert "error" in found["key"]
    assert "`vllm` must be a version that this plugin was tested with" in said


def test_a_server_answers_many_clients_and_again_after_it_was_killed(tmp_path):
    """The example compares every answer with Transformers', and fails where one is wrong or lost."""
    example = Path(__file__).parents[2] / "examples" / "serve_vllm.py"
    own = {"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    arguments = ["--clients", "16", "--seconds", "15", "--prompts", "8", "--new", "12", "--kill"]
    command = [sys.executable, str(example), *arguments, "--log", str(tmp_path / "server.log")]
    done = subprocess.run(
        command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert '"wrong": 0' in done.stdout
    assert '"lost": 0' in done.stdout
