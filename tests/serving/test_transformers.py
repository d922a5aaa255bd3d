"""Transformers' own server answers over HTTP with what generate gives; a folder is refused before it starts."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.errors import CheckpointError
from hf_linear_attn.serving.transformers import PROGRAM, main, offer

TEACHER = Path(__file__).parents[2] / "examples" / "teacher"


@pytest.fixture
def folder(tmp_path):
    model = patch_model(AutoModelForCausalLM.from_pretrained(TEACHER), "norm_preserving", window=16, sinks=2)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TEACHER).save_pretrained(tmp_path)
    return tmp_path


def test_the_class_of_a_folder_is_put_where_the_server_looks(folder, monkeypatch):
    name = "LinearAttentionLlamaForCausalLM"
    transformers = sys.modules["transformers"]
    assert name not in dir(transformers)
    monkeypatch.setattr(transformers, name, None, raising=False)
    offer(str(folder))
    model = getattr(transformers, name).from_pretrained(folder, attn_implementation=None, dtype="auto")
    ours = from_pretrained(folder)
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ours(ids).logits)


def test_softmax_folders_and_missing_ones_are_refused(tmp_path, capsys):
    with pytest.raises(CheckpointError, match="`folder` must hold a converted model"):
        offer(str(TEACHER))
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nothing")])
    assert "`folder` must be a folder or hub name with a model's config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--port", "1"])
    assert "`folder` must be named first" in capsys.readouterr().err


def ask(port, body):
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


@pytest.mark.optional
@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs transformers[serving]: make vllm")
@pytest.mark.timeout(600)
def test_the_server_answers_as_generate_does(folder, tmp_path):
    model, tokenizer = from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", PROGRAM, str(folder), "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*command, "--dtype", "float32"], stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                said = (tmp_path / "log").read_text()
                assert server.poll() is None, said[-3000:]
                assert time.monotonic() < deadline, said[-3000:]
                time.sleep(0.5)
        for prompt in ("The quick brown fox", "One two three four five six seven eight nine ten " * 8):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            tokens = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
            body = {"model": str(folder), "prompt": prompt, "max_tokens": 12, "temperature": 0}
            assert ask(port, body) == tokenizer.decode(tokens, skip_special_tokens=True)
    finally:
        server.terminate()
        server.wait(30)
