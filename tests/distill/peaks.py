"""The most memory that a step of distillation holds, as torch's allocator reports it on a CPU."""

from unittest import mock

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_linear_attn.distill import Data, DistillationSettings, distill
from hf_linear_attn.distill.data import Row


class FullRows:
    """Texts of random tokens that fill their rows."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def block(self, number, length):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, self.vocabulary, (length,), generator=generator).tolist()
        return Row(ids, [0.0] + [1.0] * (length - 1))


def two_steps(preset, **changes):
    """Return the settings of two steps of a recipe."""
    steps = {"transfer_steps": 2, "distill_steps": 2, "warmup_share": 0.0}
    run = {"model": "built", "recall_share": 0.0, "heldout_rows": 0, "log_every": 1, "progress": False}
    sizes = {"block_tokens": 128, "rows": 2, "window": 32}
    return DistillationSettings.from_preset(preset, **sizes, **steps, **run, **changes)


def measured_bytes(config, dtype, settings):
    """Return the most bytes that were allocated in the second of two steps, with the optimiser's state."""
    rows = Data(FullRows(config.vocab_size), None, recall_share=0.0, answer_weight=1.0, pad=0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")))

    def build(*arguments, **options):
        # Weights that a file lends are not of the allocator.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.to(options.get("dtype", model.dtype)).eval()

    def mark(record):
        with record_function(f"after step {record['step']}"):
            pass

    with (
        mock.patch("hf_linear_attn.distill.models._load_model", build),
        mock.patch("hf_linear_attn.distill.models.load_config", return_value=config),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found,
    ):
        distill(settings, tokenizer=tokenizer, data=(rows, rows), on_step=mark)
    marks, totals = {}, []
    waiting = list(found.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            totals.append((event.start_time_ns, event.extra_fields.total_allocated))
        else:
            marks[event.name] = event.start_time_ns
    return max(total for when, total in totals if marks["after step 1"] < when < marks["after step 2"])
