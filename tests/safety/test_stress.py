"""Runs that are killed again and again: the same figures."""

import json
import multiprocessing
import random
import shutil

import pytest
import torch

from hf_linear_attn.distill import distill
from hf_linear_attn.evaluation import evaluate, read_results, without_times
from tests.distill import tiny
from tests.evaluation import workers
from tests.evaluation.helpers import byte_tokenizer, tiny_linear
from tests.safety.test_runs import run as distil

pytestmark = pytest.mark.slow


def distillation(folder):
    torch.set_num_threads(1)
    distil(folder)


def learning_to_keep(folder):
    torch.set_num_threads(1)
    steps = {"stages": ["retain", "distill"], "retain_steps": 5, "distill_steps": 3, "checkpoint_every": 2}
    settings = tiny.tiny_settings("kept_keys", kept=3, block_tokens=32, **steps, output_dir=str(folder))
    distill(
        settings,
        teacher=tiny.tiny_teacher(),
        tokenizer=tiny.byte_tokenizer(),
        data=(tiny.tiny_data(), tiny.tiny_data()),
    )


def figures_of_distillation(folder):
    said = json.loads((folder / "distillation.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    return {name: said[name] for name in ("settings", "tokens", "trainable_parameters")} | {"weights": weights}


def evaluation(folder):
    torch.set_num_threads(1)
    # Latencies differ from run to run.
    # A kill may come after the last word was written; a finished run is only touched where that is asked for.
    finished = (folder / "results.json").exists()
    settings = workers.settings(folder, suite=("retrieval", "perplexity"), plots=False, resume=finished)
    evaluate(settings, model=tiny_linear(), tokenizer=byte_tokenizer())


def figures_of_evaluation(folder):
    results = without_times(read_results(folder))
    del results["args"]
    return json.dumps(results)


JOBS = {
    "distillation": (distillation, figures_of_distillation),
    "kept keys": (learning_to_keep, figures_of_distillation),
    "evaluation": (evaluation, figures_of_evaluation),
}


@pytest.mark.usefixtures("one_thread")
# A child of `fork` inherits one thread alone, which is all it needs; starting anew would take ten seconds a kill.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.optional)])
@pytest.mark.parametrize(("job", "figures"), JOBS.values(), ids=JOBS)
def test_runs_that_are_killed_end_with_the_same_figures(job, figures, kills, tmp_path):
    context = multiprocessing.get_context("fork")
    rng = random.Random(kills)

    def start(folder):
        child = context.Process(target=job, args=(folder,))
        child.start()
        return child

    whole = tmp_path / "whole"
    child = start(whole)
    child.join()
    assert child.exitcode == 0
    folder, longest = tmp_path / "killed", 3.0
    expected = json.dumps(figures(whole), default=repr).replace(str(whole), str(folder))
    done, finished = 0, 0
    while done < kills or not finished:
        child = start(folder)
        child.join(rng.uniform(0, longest) if done < kills else None)
        if child.is_alive():
            child.kill()
            child.join()
            done += 1
            # A machine that is too busy to finish in time is given more of it.
            longest *= 1.05
            continue
        assert child.exitcode == 0
        assert json.dumps(figures(folder), default=repr) == expected
        finished += 1
        longest *= 0.8
        shutil.rmtree(folder)
    assert finished
