"""Chunks, shared prefixes, batches and padding change what is computed together, not what is answered."""

import pytest
import torch

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.evaluation.generation import (
    PrefixReader,
    continue_rows,
    end_tokens,
    forward,
    is_out_of_memory,
    prefill,
    shared_prefix,
)
from tests.evaluation.helpers import EOS, PAD, ScriptedModel, byte_tokenizer, tiny_gpt2, tiny_linear, tiny_llama

MODELS = {"softmax": tiny_llama, "linear": tiny_linear, "linear, no window": lambda: tiny_linear(window=None)}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def tokens(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def alone(model, prompt, budget=6, ends=frozenset()):
    """Answer one prompt in one forward: what everything else must agree with."""
    return continue_rows(model, *prefill(model, prompt[None], None, 10_000), budget, ends)[0]


@torch.inference_mode()
def test_prefill_in_chunks_equals_one_forward(model):
    ids = tokens(2, 70)
    whole = model(ids, use_cache=True).logits[:, -1:]
    for chunk in (1, 7, 33, 70, 100):
        torch.testing.assert_close(prefill(model, ids, None, chunk)[0], whole, rtol=0, atol=2e-4)


@torch.inference_mode()
def test_greedy_equals_transformers_generate(model):
    ids = tokens(3, 40)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=PAD
    )[:, 40:]
    assert continue_rows(model, *prefill(model, ids, None, 16), 8, frozenset()) == expected.tolist()


@torch.inference_mode()
def test_left_padded_batch_of_four_equals_batches_of_one(model):
    prompts = [tokens(length, seed=length) for length in (31, 64, 47, 12)]
    logits, cache, mask = PrefixReader(model, 16, PAD).read(prompts)
    assert mask.sum(1).tolist() == [31, 64, 47, 12]
    assert continue_rows(model, logits, cache, 6, frozenset(), mask) == [alone(model, prompt) for prompt in prompts]


@torch.inference_mode()
def test_prompts_that_share_prefixes_are_answered_as_alone(model):
    stem = tokens(60)
    batches = []
    for cut in (10, 10, 30, 59):
        batches.append([torch.cat([stem[:cut], tokens(60 - cut, seed=7 * cut + i + len(batches))]) for i in range(2)])
    reader = PrefixReader(model, 16, PAD)
    for number, batch in enumerate(batches):
        reader.advance(batch, batches[number + 1] if number < 3 else None)
        logits, cache, mask = reader.read(batch)
        assert mask is None
        assert continue_rows(model, logits, cache, 6, frozenset()) == [alone(model, prompt) for prompt in batch]


def test_what_prompts_share_is_read_once():
    model = ScriptedModel(lambda ids: 1)
    stem = tokens(100)
    batches = [[torch.cat([stem[:90], tokens(10, seed=2 * b + i)]) for i in range(2)] for b in range(5)]
    reader = PrefixReader(model, 1000, PAD)
    for number, batch in enumerate(batches):
        reader.advance(batch, batches[number + 1] if number < 4 else None)
        reader.read(batch)
    # 90 once, then 10 for each of 10 prompts; a needle that begins alike by accident may add a token or two.
    assert 190 <= model.tokens_read <= 200


def test_a_short_prefix_is_not_read_apart():
    """After a cached prefix softmax attention cannot take its causal kernel, which costs more than is saved."""
    model = ScriptedModel(lambda ids: 1)
    stem = tokens(100)
    for cut, forwards in ((49, [(2, 100)]), (50, [(1, 50), (2, 50)])):
        seen = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        batch = [torch.cat([stem[:cut], torch.full((100 - cut,), i)]) for i in range(2)]
        assert shared_prefix(batch) == (cut if cut >= 50 else 0)
        reader = PrefixReader(model, 1000, PAD)
        reader.advance(batch, None)
        reader.read(batch)
        assert seen == forwards


def test_a_shared_prefix_leaves_a_token_to_predict_from():
    same = tokens(20)
    assert shared_prefix([same, same.clone()]) == 19
    other = same.clone()
    other[12] += 1
    assert shared_prefix([same, other]) == 12
    assert shared_prefix([same, same[:5]]) == 4


def test_rows_end_at_their_end_token_and_at_the_budget():
    script = {3: [5, EOS], 4: [6, 7, 8, 9]}
    model = ScriptedModel(lambda ids: script[ids[0]][len(ids) - 2] if len(ids) - 2 < len(script[ids[0]]) else 1)
    ids = torch.tensor([[3, 0], [4, 0]])
    assert continue_rows(model, *prefill(model, ids, None, 8), 3, frozenset([EOS])) == [[5], [6, 7, 8]]


def test_end_tokens_are_those_of_the_model_and_the_tokenizer():
    model = tiny_llama()
    model.generation_config.eos_token_id = [5, 6]
    assert end_tokens(model, byte_tokenizer()) == {5, 6, EOS}


def test_a_model_without_a_cache_is_refused():
    class Forgetful(ScriptedModel):
        def forward(self, input_ids, past_key_values=None, **options):
            output = super().forward(input_ids, past_key_values, **options)
            output.past_key_values = None
            return output

    with pytest.raises(UnsupportedError, match=r"`model` must return a cache, got 'Forgetful'"):
        forward(Forgetful(lambda ids: 1), tokens(1, 4), None)


def test_learned_positions_count_from_the_first_real_token():
    model = tiny_gpt2()
    prompts = [tokens(20, seed=1), tokens(33, seed=2)]
    with torch.inference_mode():
        logits, cache, mask = PrefixReader(model, 8, PAD).read(prompts)
        assert continue_rows(model, logits, cache, 5, frozenset(), mask) == [
            alone(model, prompt, 5) for prompt in prompts
        ]


def test_only_memory_errors_count_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
