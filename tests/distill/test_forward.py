import copy

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from hf_linear_attn.distill import forward
from hf_linear_attn.distill.forward import Predictor, predictions, weighted
from hf_linear_attn.distill.losses import ce_loss, kl_loss
from hf_linear_attn.distill.stages.distill import next_token_loss
from hf_linear_attn.distill.teacher import LiveTeacher
from tests.distill.tiny import tiny_gpt2, tiny_multimodal, tiny_teacher

SIZES = {
    "vocab_size": 259,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
MLP = {"intermediate_size": 24, "num_key_value_heads": 2}


def shifted(model):
    """Return a model that adds something to its logits that nobody can know of."""
    after = model.forward

    def forward(*arguments, **options):
        found = after(*arguments, **options)
        found.logits = found.logits + torch.arange(found.logits.shape[-1]).to(found.logits.dtype).sin()
        return found

    model.forward = forward
    return model


MODELS = {
    "llama": tiny_teacher,
    "tied": lambda: tiny_teacher(tie_word_embeddings=True),
    "gpt2": lambda: tiny_gpt2(positions=64),
    "gemma3": tiny_multimodal,
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, **MLP, head_dim=8, final_logit_softcapping=2.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, **MLP, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **MLP, logits_scaling=8.0)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=8, max_position_embeddings=64)),
    "whole": lambda: shifted(tiny_teacher()),
}


def model_of(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().eval()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_losses_in_pieces_are_those_of_whole_logits(name, share, data, monkeypatch):
    # Five tokens at once.
    monkeypatch.setattr(forward, "PIECE_BYTES", 5 * 4 * 259)
    batch = data[0].batch(range(4), 16)
    student, teacher = model_of(name), model_of(name)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(1.1)
    whole = copy.deepcopy(student) if name != "whole" else model_of(name)
    targets, weights, logits = predictions(whole, batch)
    expected = (1 - share) * ce_loss(logits, targets, weights)
    expected = expected + share * kl_loss(logits, predictions(teacher, batch)[2].detach(), weights)
    (0.1 * expected).backward()
    predictor = Predictor(student)
    found = next_token_loss(predictor, batch, LiveTeacher(lambda: teacher) if share else None, share)
    assert (predictor.head is None) == (name == "whole")
    (0.1 * found).backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    own, others = gradients(student), gradients(whole)
    assert own.keys() == others.keys()
    for key, x in own.items():
        # Some gradients, such as those of keys' biases, are zero but for rounding.
        torch.testing.assert_close(x, others[key], rtol=1e-5, atol=1e-6 + 1e-5 * others[key].abs().max().item())


def test_frozen_heads_get_no_gradient_and_hidden_states_do(data, monkeypatch):
    monkeypatch.setattr(forward, "PIECE_BYTES", 5 * 4 * 259)
    student = model_of("llama")
    student.lm_head.requires_grad_(False)
    next_token_loss(Predictor(student), data[0].batch(range(4), 16)).backward()
    assert student.lm_head.weight.grad is None
    assert student.model.norm.weight.grad.abs().max() > 0


def test_logits_are_never_whole(data, monkeypatch):
    monkeypatch.setattr(forward, "PIECE_BYTES", 5 * 4 * 259)
    batch = data[0].batch(range(4), 16)
    student, seen = model_of("llama"), []
    student.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    predictor = Predictor(student)
    states = weighted(batch, predictor.states(batch))
    predictor.total(states, lambda logits, which: logits.float().sum()).backward()
    # The model itself computes the last token's of each row.
    assert max(seen) == 5
    assert sum(seen) >= len(states)
