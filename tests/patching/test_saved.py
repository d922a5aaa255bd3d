"""What earlier versions saved is read alike: folders, contexts and generated tokens in ``saved/``."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_linear_attn import from_pretrained, load_context
from hf_linear_attn.patching.call_cache import NAME

SAVED = Path(__file__).parent / "saved"


@pytest.mark.parametrize("folder", sorted(path.name for path in SAVED.iterdir() if path.is_dir()))
@torch.no_grad()
def test_earlier_folders_and_contexts_give_the_same(folder):
    expected = load_file(SAVED / folder / "expected.safetensors")
    ids, mask = expected["input_ids"], expected["attention_mask"]
    model = from_pretrained(SAVED / folder)
    logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected["logits"][mask.bool()], atol=1e-5, rtol=1e-5)
    context = load_context(SAVED / folder / "context.safetensors", model)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, len(context) :]
    after = model(ids[:, len(context) :], attention_mask=mask, **{NAME: context.copy()}, position_ids=positions).logits
    torch.testing.assert_close(after, expected["after_context"], atol=1e-5, rtol=1e-5)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    greedy = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    assert torch.equal(greedy, expected["greedy"])
