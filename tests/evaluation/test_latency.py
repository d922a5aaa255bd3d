"""Memory is counted exactly; times are only as good as the machine, so what is tested is what they are taken of."""

import pytest
import torch

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.evaluation.generation import prefill
from hf_linear_attn.evaluation.meters import PeakTensorBytes, cache_bytes
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.suites.latency import Latency, break_even
from tests.evaluation.helpers import (
    ScriptedModel,
    SmallModel,
    byte_tokenizer,
    subject,
    tiny_gpt2,
    tiny_linear,
    tiny_llama,
)


def settings(**options):
    given = {"suite": ("latency",), "lengths": (32, 64), "warmups": 1, "repeats": 3, "decode_tokens": 4}
    return EvaluationSettings(**given | {"progress": False} | options)


def measure(one, length, chosen):
    return Latency(chosen, [one], byte_tokenizer()).measure(one, length)


def test_peak_counts_what_is_alive_at_once():
    with PeakTensorBytes() as counter:
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b * 2
        view = c[:10]
        del b, c
        d = torch.zeros(500)
    # Two tensors of 4000 bytes at any time; the view keeps its storage, beside which 2000 bytes are few.
    assert counter.peak == 8000
    assert view.numel() + d.numel() == 510


def test_peak_counts_in_place_and_given_tensors_once():
    given = torch.zeros(1000)
    with PeakTensorBytes() as counter:
        given.add_(1)
        given.view(10, 100)
    assert counter.peak == 0


@torch.inference_mode()
def test_cache_bytes_are_those_of_the_keys_and_values():
    _, cache = prefill(tiny_llama(), torch.zeros(3, 20, dtype=torch.long), None, 8)
    # 2 layers, keys and values, 3 rows, 1 head of 16, 20 tokens, 4 bytes.
    assert cache_bytes(cache) == 2 * 2 * 3 * 1 * 16 * 20 * 4


@torch.inference_mode()
def test_the_cache_of_a_patched_model_does_not_grow():
    model = tiny_linear()
    sizes = [cache_bytes(prefill(model, torch.zeros(1, n, dtype=torch.long), None, 2048)[1]) for n in (40, 80, 320)]
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_a_cell_holds_positive_figures_of_the_asked_shape():
    found = measure(subject(tiny_linear()), 64, settings(batch_size=2))
    assert (found["prompt_tokens"], found["decoded_tokens"], found["batch_size"]) == (60, 4, 2)
    assert found["ttft_ms"] > 0
    assert found["decode_ms_per_token"] > 0
    assert found["prefill_tokens_per_s"] == pytest.approx(1000 * 120 / found["ttft_ms"])
    assert found["ttft_ms_iqr"][0] <= found["ttft_ms"] <= found["ttft_ms_iqr"][1]
    assert found["peak_mib"] * 2**20 > found["cache_bytes"]
    assert found["peak_method"] == "tensor bytes"


def test_every_repeat_reads_a_fresh_cache_and_decodes_at_the_same_context():
    shapes = []

    class Watched(ScriptedModel):
        def forward(self, input_ids, past_key_values=None, **options):
            before = 0 if past_key_values is None else past_key_values.ids.shape[1]
            shapes.append((before, input_ids.shape[1]))
            return super().forward(input_ids, past_key_values=past_key_values, **options)

    measure(subject(Watched(lambda ids: 1)), 32, settings())
    # 4 prefills, of which the last is decoded from, and one for the memory; 4 decodes and one for the memory.
    assert shapes.count((0, 28)) == 5
    assert [shapes.count((at, 1)) for at in (28, 29, 30, 31)] == [5, 5, 5, 5]
    assert len(shapes) == 25


def test_peak_memory_and_cache_repeat_exactly():
    first, second = (measure(subject(tiny_llama()), 48, settings()) for _ in range(2))
    assert (first["peak_mib"], first["cache_bytes"]) == (second["peak_mib"], second["cache_bytes"])


def test_cells_beyond_the_positions_or_the_memory_are_marked():
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    small = SmallModel(lambda ids: 1, 40, error)
    subjects = [subject(tiny_gpt2(positions=40)), subject(small, "small", "baseline")]
    chosen = settings()
    store = SampleStore(None, chosen.identity(), {})
    suite = Latency(chosen, subjects, byte_tokenizer())
    done = []
    suite.run(store, done.append)
    # What is compared is timed one right after the other.
    assert done == [32, 32, 64, 64]
    cells = suite.collect(store)["latency"]
    assert [cell["status"] for cell in cells] == ["ok", "unsupported", "ok", "out-of-memory"]
    assert {cell["ttft_ms"] for cell in cells if cell["status"] != "ok"} == {None}
    assert len({frozenset(cell) for cell in cells}) == 1


def test_eager_softmax_is_not_timed():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError, match=r"`attn_implementation` must be a fused one for the latency suite"):
        Latency(settings(), [subject(model)], byte_tokenizer()).check()
    model.set_attn_implementation("sdpa")
    Latency(settings(), [subject(model), subject(tiny_linear(), "other", "baseline")], byte_tokenizer()).check()


def test_speed_may_be_measured_at_other_lengths_and_in_another_batch():
    chosen = settings(latency_lengths=(48, 16), latency_batch_size=2, batch_size=4, warmups=0, repeats=1)
    suite = Latency(chosen, [subject(tiny_linear())], byte_tokenizer())
    store = SampleStore(None, chosen.identity(), {})
    suite.run(store, lambda tokens: None)
    cells = suite.collect(store)["latency"]
    assert [(cell["length"], cell["batch_size"]) for cell in cells] == [(16, 2), (48, 2)]
    assert break_even([{**c, "model": m} for c in cells for m in "ab"], "a", "b").keys() >= {"decode", "memory"}


def test_cells_of_other_batches_are_not_compared():
    def cell(model, batch, cost):
        return {"model": model, "length": 64, "status": "ok", "batch_size": batch, "ttft_ms": cost,
                "decode_ms_per_token": cost, "peak_mib": cost}  # fmt: skip

    assert break_even([cell("a", 1, 1.0), cell("b", 8, 9.0)], "a", "b")["decode"] is None
    assert break_even([cell("a", 1, 1.0), cell("b", 8, 9.0), cell("b", 1, 2.0)], "a", "b")["decode"] == 64


def test_break_even_needs_lengths_that_both_could_read():
    def cell(model, length, cost, status="ok"):
        figures = {"ttft_ms": cost, "decode_ms_per_token": 1.0, "peak_mib": 2 * cost}
        return {"model": model, "length": length, "status": status, **figures}

    cells = [cell("a", n, n) for n in (100, 200, 400)] + [cell("b", n, n * n / 200) for n in (100, 200, 400)]
    found = break_even(cells, "a", "b")
    assert found["prefill"] == pytest.approx(200)
    assert found["memory"] == pytest.approx(200)
    assert found["decode"] is None
    lost = [{**c, "status": "out-of-memory"} if c["model"] == "b" else c for c in cells]
    assert break_even(lost, "a", "b")["prefill"] is None
