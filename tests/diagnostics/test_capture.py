import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from hf_linear_attn import patch_model
from hf_linear_attn.diagnostics import observe_attention
from hf_linear_attn.errors import ArgumentError, UnsupportedError

IDS = torch.arange(40)[None] % 13


def softmax_attention(x):
    groups = x.q.shape[1] // x.k.shape[1]
    scores = x.scaling * x.q @ x.k.repeat_interleave(groups, 1).mT
    if x.causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    o = scores.softmax(-1) @ x.v.repeat_interleave(groups, 1)
    return o.transpose(1, 2).flatten(2)


def tiny(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=64))
        return model.eval(), [block.attn.c_proj for block in model.transformer.h]
    config = BertConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    model = BertModel(config)
    return model.eval(), [layer.attention.output.dense for layer in model.encoder.layer]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@torch.no_grad()
def test_what_is_seen_is_what_the_model_computes_with(kind, llama):
    model, projections = (
        (llama, [layer.self_attn.o_proj for layer in llama.model.layers]) if kind == "llama" else tiny(kind)
    )
    outputs, seen = [], []
    for projection in projections:
        projection.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    before = model.config._attn_implementation
    plain = model(input_ids=IDS)[0]
    outputs.clear()
    with observe_attention(model, seen.append):
        observed = model(input_ids=IDS)[0]
    assert model.config._attn_implementation == before
    assert torch.equal(plain, observed)
    assert [x.index for x in seen] == [0, 1]
    for x, o in zip(seen, outputs, strict=True):
        assert x.causal == (kind != "bert")
        torch.testing.assert_close(softmax_attention(x), o)


def test_the_implementation_is_put_back_after_an_error(llama):
    def fail(inputs):
        raise RuntimeError("stop")

    before = llama.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop"), observe_attention(llama, fail):
        llama(input_ids=IDS)
    assert llama.config._attn_implementation == before


def test_a_patched_model_is_refused(llama):
    patch_model(llama)
    with (
        pytest.raises(ArgumentError, match="`model` must be a softmax model, got 'a patched"),
        observe_attention(llama, print),
    ):
        pass


def test_a_model_without_attention_is_refused():
    config = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4)
    model = MambaForCausalLM(config)
    assert isinstance(model, type(AutoModelForCausalLM.from_config(config)))
    with pytest.raises(UnsupportedError, match="There is nothing to look at"), observe_attention(model, print):
        pass
