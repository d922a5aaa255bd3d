"""The bridge to lm-evaluation-harness, on tasks that need no network."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.evaluation import EvaluationSettings, evaluate
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.suites.lm_eval import LmEval
from hf_linear_attn.evaluation.tasks import get_task, niah, sample_rng
from tests.evaluation.helpers import EOS, ScriptedModel, byte_tokenizer, subject, tiny_gpt2, tiny_linear

TEACHER = Path(__file__).parents[2] / "examples" / "teacher"
needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-evaluation-harness")


def settings(**options):
    given = {"suite": ("lm-eval",), "lengths": (700, 800), "lm_eval_tasks": ("niah_single_1",), "lm_eval_samples": 2}
    return EvaluationSettings(**given | {"offline": True, "progress": False} | options)


def answering(tokenizer, answer):
    """Return a script that writes `answer(prompt)` after the prefix that the harness puts before an answer."""

    def script(ids):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        end = re.search(r"mentioned in the provided text is\b", text)
        if not end:
            return ord(" ")
        reply = " " + answer(text[: end.start()])
        written = text[end.end() :]
        return tokenizer(reply[len(written)], add_special_tokens=False)["input_ids"][0] if written != reply else EOS

    return script


@needs_harness
@pytest.mark.optional
@pytest.mark.timeout(900)
def test_an_oracle_scores_one_at_every_length_and_a_blind_model_zero(monkeypatch):
    pytest.importorskip("lm_eval.tasks.ruler.niah_utils")
    tokenizer = byte_tokenizer()
    oracle = ScriptedModel(answering(tokenizer, lambda text: re.search(r"is: (\d+)\.", text)[1]))
    blind = ScriptedModel(answering(tokenizer, lambda text: "1234567"))
    for model in (oracle, blind):
        # The harness asks Transformers to generate.
        monkeypatch.setattr(model, "generate", make_generate(model), raising=False)
    results = evaluate(settings(), model=oracle, tokenizer=tokenizer, baselines={"blind": blind})
    found = {(row["model"], row["length"]): (row["value"], row["n"]) for row in results["lm_eval"]}
    assert found == {
        ("model", 700): (1.0, 2), ("model", 800): (1.0, 2), ("blind", 700): (0.0, 2), ("blind", 800): (0.0, 2),
    }  # fmt: skip
    prompts = {row["model"]: row["prompts_sha256"] for row in results["lm_eval"] if row["length"] == 700}
    assert prompts["model"] == prompts["blind"]


@needs_harness
@pytest.mark.optional
def test_our_needle_prompt_reads_as_the_harness_has_it():
    pytest.importorskip("lm_eval.tasks.ruler.niah_utils")
    tokenizer = byte_tokenizer()
    task, _ = LmEval(settings(), [], tokenizer).build("niah_single_1")
    theirs = task.dataset["test"][0]
    ours = get_task("niah_single").build(tokenizer, 800, 50, sample_rng(0, "niah_single", 800, 50, 0))

    def lines(text):
        text = re.sub(r"\b[a-z]+(-[a-z]+)+\b", "KEY", re.sub(r"\b\d{7}\b", "NUMBER", text))
        return text.splitlines()

    found = lines(tokenizer.decode(ours.input_ids, skip_special_tokens=True))
    expected = lines(f"{task.doc_to_text(theirs)} {theirs['gen_prefix']}")
    # Ours are of an exact length, so that the first line of noise is cut.
    assert found[0] == expected[0]
    assert set(found[2:]) == set(expected[1:])
    assert found[-1] == expected[-1]


@needs_harness
@pytest.mark.optional
def test_a_length_that_the_harness_cannot_fill_is_named():
    pytest.importorskip("lm_eval.tasks.ruler.cwe_utils")
    with pytest.raises(ArgumentError, match=r"`lengths` must leave the harness room .* got 700 \(task 'ruler_cwe'\)"):
        LmEval(settings(), [], byte_tokenizer()).build("ruler_cwe")


@needs_harness
@pytest.mark.optional
def test_babilong_is_run_at_every_length_with_the_data_of_each(monkeypatch):
    asked = []

    def load_dataset(path, name=None, split=None):
        asked.append((path, name, split))
        # Longer than the model's declared positions: what is asked for must not be cut off.
        facts = f"Mary went to the {name} room." + " Nothing happened." * 80
        return Dataset.from_list([{"input": facts, "question": "Where is Mary?", "target": f"the {name} room"}] * 2)

    def script(ids):
        prompt, _, written = tokenizer.decode(ids, skip_special_tokens=True).rpartition("?")
        rooms = re.findall(r"went to (the \w+ room)", prompt)
        reply = f" {rooms[-1] if rooms else 'nowhere'}."
        goes_on = reply.startswith(written) and written != reply
        return tokenizer(reply[len(written)], add_special_tokens=False)["input_ids"][0] if goes_on else EOS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    tokenizer = byte_tokenizer()
    oracle = ScriptedModel(script)
    oracle.config.max_position_embeddings = 64
    monkeypatch.setattr(oracle, "generate", make_generate(oracle), raising=False)
    chosen = settings(lm_eval_tasks=("babilong_qa1", "babilong_qa7"), lengths=(1024, 4096), offline=False)
    rows = evaluate(chosen, model=oracle, tokenizer=tokenizer)["lm_eval"]
    found = [(row["task"], row["length"], row["metric"], row["value"], row["n"]) for row in rows]
    assert found == [
        ("babilong_qa1", 1024, "acc,none", 1.0, 2),
        ("babilong_qa1", 4096, "acc,none", 1.0, 2),
        ("babilong_qa7", None, "acc,none", 1.0, 2),
    ]
    path = "RMT-team/babilong-1k-samples"
    assert asked == [(path, "1k", "qa1"), (path, "4k", "qa1"), (path, "0k", "qa7")]


@needs_harness
@pytest.mark.optional
@pytest.mark.timeout(900)
def test_our_score_agrees_with_the_harness_on_a_model_that_is_neither_perfect_nor_blind(monkeypatch):
    """A teacher that keeps few keys, untrained, and RULER's words for keys: the teacher knows ours."""
    prepare = pytest.importorskip("lm_eval.tasks.ruler.prepare_niah")
    monkeypatch.setattr(niah, "word_pair", lambda rng: rng.choice(prepare.WORDS))
    monkeypatch.setattr(niah, "longest_pair", lambda tokenizer: max(prepare.WORDS, key=len))
    few: dict = {"window": 64, "sinks": 4, "kept": 32, "mix": "window", "retention": "redundancy"}
    model = patch_model(AutoModelForCausalLM.from_pretrained(TEACHER).eval(), **few)
    both = settings(
        suite=("retrieval", "lm-eval"),
        tasks=("niah_single",),
        lengths=(512,),
        num_samples=10,
        lm_eval_samples=50,
        batch_size=10,
    )
    results = evaluate(both, model=model, tokenizer=AutoTokenizer.from_pretrained(TEACHER))
    ours = wilson_interval(sum(cell["score"] * cell["n"] for cell in results["cells"]), 50)
    (row,) = results["lm_eval"]
    assert row["n"] == 50
    assert ours[0] < row["ci95"][1]
    assert row["ci95"][0] < ours[1]
    assert 0.2 < row["value"] < 0.9


def make_generate(model):
    import torch

    from hf_linear_attn.evaluation.generation import continue_rows, prefill

    def generate(input_ids, attention_mask=None, max_length=None, **options):
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            prompt = ids[mask.bool()][None]
            new = continue_rows(model, *prefill(model, prompt, None, 4096), 40, frozenset([EOS]))[0]
            rows.append(torch.cat([ids, torch.tensor(new + [EOS] * (40 - len(new)))]))
        return torch.stack(rows)

    return generate


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            tiny_linear,
            {"lm_eval_tasks": ("piqa",)},
            r"`lm_eval_tasks` must need no network under `offline`, got 'piqa'. Use one of those; available: niah",
        ),
        (
            tiny_linear,
            {"lm_eval_tasks": ("babilong_qa2",), "lengths": (1024, 1500), "offline": False},
            r"`lengths` must be 1024 times a power of two, up to 131072, got 1500 \(task 'babilong_qa2'\)",
        ),
        (tiny_linear, {"lm_eval_samples": 501}, r"`lm_eval_samples` must be at most 500, got 501"),
        (
            tiny_gpt2,
            {"lengths": (300,)},
            r"`lengths` must leave 128 of the model's 320 positions for the answer, got 300",
        ),
    ],
)
def test_what_the_harness_would_get_wrong_is_refused(monkeypatch, model, options, message):
    # Refused before the harness is imported, so it need not be there.
    monkeypatch.setattr("hf_linear_attn.evaluation.suites.lm_eval.find_spec", lambda name: True)
    with pytest.raises(ArgumentError, match=message):
        LmEval(settings(**options), [subject(model())], byte_tokenizer()).check()


def test_a_missing_harness_is_named(monkeypatch):
    monkeypatch.setattr("hf_linear_attn.evaluation.suites.lm_eval.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"Install it: pip install 'hf_linear_attn\[lm-eval\]'"):
        LmEval(settings(), [subject(tiny_linear())], byte_tokenizer()).check()
