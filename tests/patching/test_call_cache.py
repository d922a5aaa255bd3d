"""A call's cache, under each name that a version of Transformers has for it, and by position."""

import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching import convert_cache, encode_context
from hf_linear_attn.patching.call_cache import NAME

from .checks import prompt
from .zoo import tiny_model

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model():
    return patch_model(tiny_model("causal", "llama"), "hedgehog", window=3, sinks=2)


@pytest.mark.parametrize("more", [{}, {"num_beams": 4}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_generate_takes_cache_in_every_version(model, more):
    context, question, found = encode_context(model, prompt(13, 0)), prompt(4, 1), []
    for name in ("cache", NAME):
        torch.manual_seed(0)
        found.append(model.generate(question, **GREEDY | more | {name: context.copy()}))
    assert torch.equal(*found)


def test_a_context_in_place_of_a_cache_is_refused(model):
    context = encode_context(model, prompt(13, 0))
    for call in (model.generate, model):
        with torch.no_grad(), pytest.raises(ArgumentError, match=r"`cache` must be a cache, got 'a Context'.*copy\(\)"):
            call(prompt(4, 1), **{NAME: context})


def test_a_record_begins_once_the_cache_knows_its_model(model):
    """Before, Transformers has nowhere to note that it was asked for; that is said, not passed over."""
    ids = prompt(12, 3)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :8], **{NAME: cache})
        assert not cache.is_croppable
        with pytest.raises(ArgumentError, match=r"convert_cache\(model, cache\)"):
            cache.crop(-3)
        cache = DynamicCache(config=model.config)
        convert_cache(model, cache)
        cache.activate_past_recording()
        model(ids[:, :8], **{NAME: cache})
        assert cache.is_croppable
        cache.crop(-3)
        found = model(ids[:, 5:], **{NAME: cache}).logits
        torch.testing.assert_close(found, model(ids).logits[:, 5:], rtol=1e-5, atol=1e-5)


SCRIPT = """
import tempfile, torch
from transformers import LlamaConfig, LlamaForCausalLM
from hf_linear_attn import ContextStore, patch_model
from hf_linear_attn.distill.baseline import equal_cache_window
from hf_linear_attn.evaluation.generation import forward, prefill
from hf_linear_attn.patching import encode_context
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
model = patch_model(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), "elu", window=4, sinks=1)
ids, options = torch.arange(3, 30)[None], dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
model.generate(ids, cache=encode_context(model, ids, chunk_size=8).copy(), num_beams=2, **options)
model.generate(ids, cache=ContextStore(tempfile.mkdtemp(), model, block_size=8).longest(ids), **options)
model.generate(ids, assistant_model=model, **options)
model.generate(ids, prompt_lookup_num_tokens=2, **options)
equal_cache_window(model)
prefill(model, ids, forward(model, ids, None)[1], chunk=8)
"""


def test_nothing_of_ours_uses_a_name_that_is_deprecated():
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not any(name in done.stderr for name in ("past_key_values", "cache_params"))


def test_a_decoders_cache_beside_an_encoders_is_looked_at_too():
    model, ids = patch_model(tiny_model("seq2seq", "bart"), "elu"), prompt(6)
    decoder, mask = model.get_decoder(), torch.ones(1, 9, dtype=torch.long)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        hidden = model.get_encoder()(ids).last_hidden_state
        more = {"encoder_hidden_states": hidden, "use_cache": True, NAME: cache}
        decoder(input_ids=ids, attention_mask=mask[:, :6], **more)
        mask[:, 2] = 0
        with pytest.raises(ArgumentError, match=r"`attention_mask` must show the \[6\] real tokens"):
            decoder(input_ids=ids[:, :3], attention_mask=mask, **more)


@pytest.mark.parametrize("architecture", ["bart", "marian"])
def test_an_encoders_padding_says_nothing_of_what_a_decoder_has_read(architecture):
    model = patch_model(tiny_model("seq2seq", architecture), "elu")
    ids, mask = prompt(14, rows=2), torch.ones(2, 14, dtype=torch.long)
    mask[0, 9:] = 0
    more = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    both = model.generate(ids, attention_mask=mask, **more)
    alone = model.generate(ids[:1, :9], attention_mask=mask[:1, :9], **more)
    assert torch.equal(both[:1], alone)
