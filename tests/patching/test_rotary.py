"""The linear branch reads queries and keys with the model's rotation undone, whatever it reads them in."""

import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.llama import modeling_llama

from hf_linear_attn import patch_model, unpatch_model
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.baseline import equal_cache_window
from hf_linear_attn.distill.stages.transfer import attention_weights, teacher_forced, weights_forced
from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.layers import Call, LinearAttention, spans
from hf_linear_attn.ops.hybrid import Tokens, hybrid_reference
from hf_linear_attn.ops.rotation import STILL, Layout, Rotation
from hf_linear_attn.patching import attention_layers, part_of
from hf_linear_attn.patching.call_cache import NAME, returned_cache
from hf_linear_attn.patching.hook import linear_attention_forward
from hf_linear_attn.patching.scope import current
from tests.ops.hybrid import params_of
from tests.patching.checks import Subject, checks_for, close, gradients, prompt, save_and_load
from tests.patching.test_sweep import NOT_BUILT
from tests.patching.zoo import MAPPINGS, VOCAB, randomise, registered, tiny_model

SETTINGS = {"feature_map": "norm_preserving", "window": 3, "sinks": 2, "rotary": "undo"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
EXPECTED = {
    "llama": Layout("half"),
    "gpt_neox": Layout("half"),
    "cohere": Layout("next"),
    "glm": Layout("next", "first"),
    "ernie4_5": Layout("next", "first"),
    "phi": Layout("half"),
    "qwen2": Layout("half"),
    "deepseek_v3": Layout("half", "first", at_end=True),
    "deepseek_v2": Layout("next", "pair", at_end=True),
}


def model_of(kind, **settings):
    """Build a tiny softmax model, or patch it where there are settings."""
    if kind == "yarn":
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        config = LlamaConfig(**sizes, **heads, rope_parameters=YARN, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        model = randomise(LlamaForCausalLM(config).eval())
    else:
        model = tiny_model("causal", kind)
    return patch_model(model, **settings) if settings else model


NOT_UNDONE = {
    "hunyuan_v1_dense": "norms with weights after the rotation",
    "hunyuan_v1_moe": "norms with weights after the rotation",
    "kimi_linear": "its source speaks of one, and there is none",
    "moshi": "rotates by itself",
    "recurrent_gemma": "rotates by itself",
    "llama4": "norms after the rotation",
    "llama4_text": "norms after the rotation",
    "nanochat": "norms after the rotation",
    # Until 5.24 they rotated inside, and nothing was known of it.
    **dict.fromkeys(("gptj", "codegen") if NAME == "cache" else (), "sines come before cosines"),
}
"""Architectures that are converted, but whose rotation is not undone, with the reason."""


def seen_by_layers(model, ids):
    """Return what every converted layer is called with: q, k, v and the call."""
    calls = []
    parts = [m for m in model.modules() if isinstance(m, LinearAttention)]
    handles = [part.register_forward_pre_hook(lambda part, args: calls.append((part, *args))) for part in parts]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def without_positions(model):
    """Make a model hand its attention modules angles of nothing: what it then projects is not rotated."""

    def flat(module, args, kwargs):
        pair = kwargs["position_embeddings"]
        if isinstance(pair, torch.Tensor):
            return args, {**kwargs, "position_embeddings": torch.ones_like(pair)}
        return args, {**kwargs, "position_embeddings": (torch.ones_like(pair[0]), torch.zeros_like(pair[1]))}

    for module in model.modules():
        if part_of(module) is not None:
            module.register_forward_pre_hook(flat, with_kwargs=True, prepend=True)
    return model


@pytest.mark.parametrize("kind", [*EXPECTED, "yarn"])
def test_the_linear_branch_reads_what_was_projected_without_rotation(kind):
    """That is what a module projects that is told of no angles; window and sinks read rotated tokens."""
    ids = prompt(14, rows=2)
    model = model_of(kind, **SETTINGS)
    part, q, k, v, call = seen_by_layers(model, ids)[0]
    _, plain_q, plain_k, _, _ = seen_by_layers(without_positions(model_of(kind, **SETTINGS)), ids)[0]
    assert part.layout == EXPECTED.get(kind, Layout("half"))
    assert not torch.allclose(q, plain_q, atol=0.1)
    for x, plain in ((q, plain_q), (k, plain_k)):
        assert (call.rotation.undo(x) - plain).abs().max() < 1e-5 * plain.abs().max()
        assert (call.rotation.do(plain) - x).abs().max() < 1e-5 * x.abs().max()
    with torch.no_grad():
        o = part.forward(q, k, v, call)
        assert (o - by_definition(part, q, k, v, call)).abs().max() < 1e-4


def by_definition(part, q, k, v, call):
    """Return what the definition of a layer gives where the linear branch reads tokens that are turned back."""
    params = replace(params_of(part), scaling=part.scaling(call))
    return hybrid_reference(Tokens(q=q, k=k, v=v, rotation=call.rotation), params)[0]


@pytest.mark.parametrize(
    ("kind", "mix"),
    [("llama", "key"), ("llama", "gate"), ("llama", "shared"), ("llama", None), ("gpt_neox", "key"), ("cohere", "key")],
)
def test_what_holds_of_every_conversion_holds(kind, mix):
    settings = SETTINGS | ({"mix": mix} if mix else {"window": None, "sinks": 0})
    subject = Subject(model_of(kind, **settings), "causal")
    for check in checks_for("causal"):
        check(subject)
    save_and_load(subject)
    gradients(subject.model, "causal")


def logits_of(model, ids, cache, pieces):
    with torch.no_grad():
        parts = [model(input_ids=x, **{NAME: cache}, use_cache=True).logits for x in ids.split(pieces, 1)]
    return torch.cat(parts, 1)


def test_long_texts_are_read_span_by_span(monkeypatch):
    for name in ("SPAN", "CHUNK"):
        monkeypatch.setattr(spans, name, 64)
    monkeypatch.setattr(spans, "LENGTHS", (64, 64))
    assert len(spans.spans_of(torch.empty(1, 4, 300, 8))) == 5
    model = model_of("llama", **SETTINGS | {"window": 9})
    ids = prompt(120)
    part, q, k, v, call = seen_by_layers(model, ids)[0]
    q, k, v = (torch.randn(1, x.shape[1], 300, x.shape[3]) for x in (q, k, v))
    angles = torch.rand(1, 300, q.shape[3] // 2) * 6
    angles = torch.cat([angles, angles], -1)
    call = Call(rotation=Rotation.of(angles.cos(), angles.sin(), Layout("half")))
    q.requires_grad_()
    o = part(q, k, v, call)
    with torch.no_grad():
        assert (o - by_definition(part, q, k, v, call)).abs().max() < 1e-4
    o.square().sum().backward()
    assert q.grad.isfinite().all()
    assert q.grad.abs().sum() > 0


def test_packed_texts_are_texts_alone():
    """In a row alone, too, which is not laid end to end with others."""
    model = model_of("llama", **SETTINGS)
    rows = prompt(12, rows=2)
    places = torch.stack([torch.cat([torch.arange(7), torch.arange(5)]), torch.arange(12)])
    with torch.no_grad():
        both = model(rows, position_ids=places, use_cache=False).logits
        close(both[:1, :7], model(rows[:1, :7], use_cache=False).logits, "the first text")
        close(both[:1, 7:], model(rows[:1, 7:], use_cache=False).logits, "the second text")
        close(both[1:], model(rows[1:], use_cache=False).logits, "the second row")
        close(model(rows[:1], position_ids=places[:1], use_cache=False).logits, both[:1], "a row alone")


def test_tokens_after_a_rollback_of_a_static_cache_are_read_with_their_own_angles():
    model, ids = model_of("llama", **SETTINGS), prompt(16, rows=2)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(ids[:, :6], **{NAME: cache})
        cache.activate_past_recording()
        model(ids[:, 6:7], **{NAME: cache})
        wrong = torch.cat([ids[:, 7:9], prompt(4, seed=1, rows=2)], 1)
        model(wrong, **{NAME: cache})
        cache.crop(-4)
        after = model(ids[:, 9:], **{NAME: cache}).logits
        close(after, model(ids, use_cache=False).logits[:, 9:], "after a rollback")


@pytest.mark.slow
def test_bf16_keeps_what_was_rounded_in_decoding():
    model = model_of("llama", **SETTINGS).bfloat16()
    ids = prompt(14, rows=2)
    whole = logits_of(model, ids, None, [14])
    parts = logits_of(model, ids, DynamicCache(config=model.config), [1] * 14)
    assert (parts - whole).abs().max() < 0.05 * whole.abs().max()


@pytest.mark.parametrize("mix", ["key", "window"])
def test_angles_are_counted_in_the_cache(mix):
    """A window's token has a key and a value of 8 in 2 heads, and 8 cosines and sines."""
    keep, undo = (model_of("llama", **SETTINGS | {"rotary": x, "mix": mix}) for x in ("keep", "undo"))
    ids = prompt(14)
    held = [returned_cache(m(ids, use_cache=True)).layers[0].tensors for m in (keep, undo)]
    assert [x.get("near_turns", torch.empty(0)).shape for x in held] == [(0,), (1, 6, 8) if mix == "key" else (0,)]
    if mix == "key":
        # S, z and the keys' sum of 2 heads; beside them 6 slots of 8 numbers, W + 1 and the sinks. A token has 2 * 16.
        linear = 2 * (16 * 8 + 16 + 8)
        assert equal_cache_window(keep) == 3 + math.ceil(linear / 32)
        # Two layers hold the angles together.
        assert equal_cache_window(undo) == 3 + math.ceil((2 * linear + 6 * 8) / 64)


def test_a_distillation_takes_it_with_the_rest_of_the_conversion():
    settings = DistillationSettings(**DistillationSettings(rotary="undo", window=3).to_dict())
    model = settings.convert(tiny_model("causal", "llama"))
    assert settings.rotary == model.config.linear_attention["rotary"] == "undo"
    assert DistillationSettings().conversion.rotary == "auto"


def test_learned_positions_have_nothing_to_undo(caplog):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **sizes)
    ids, found = prompt(14), []
    for rotary in ("keep", "undo"):
        torch.manual_seed(0)
        with caplog.at_level(logging.WARNING):
            model = patch_model(GPT2LMHeadModel(config).eval(), **SETTINGS | {"rotary": rotary})
        found.append(model(ids).logits)
    assert torch.equal(*found)
    assert caplog.messages == ["GPT2LMHeadModel: no layer that is converted has a rotation to undo"]


def test_layers_without_positions_have_nothing_to_undo():
    """Every fourth layer of SmolLM3 gets angles and does not use them."""
    model = tiny_model("causal", "smollm3", no_rope_layers=[1, 0])
    patch_model(model, **SETTINGS, layers="all")
    parts = [part for part, *_ in seen_by_layers(model, prompt(14))]
    assert [part.layout for part in parts] == [Layout("half"), STILL]
    for check in checks_for("causal"):
        check(Subject(model, "causal"))


def test_a_rotation_made_inside_is_refused_by_name():
    model = tiny_model("causal", "recurrent_gemma")
    with pytest.raises(
        UnsupportedError,
        match=r"`rotary` must be 'keep' or 'auto' where .*, got 'undo' .*speaks of a rotation that it is not handed",
    ):
        patch_model(model, rotary="undo", layers="all")
    assert patch_model(model, layers="all") is model


def test_an_unknown_rotation_is_refused_by_name(monkeypatch):
    def strange(q, k, cos, sin, unsqueeze_dim=1):
        return q.flip(-1) * cos[:, None], k.flip(-1) * cos[:, None]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", strange)
    model = model_of("llama", **SETTINGS)
    with pytest.raises(UnsupportedError, match=r"`rotary` must be 'keep' .*no known rotation makes.*say so"):
        model(prompt(5))


def test_auto_is_undone_where_that_is_known_and_kept_elsewhere(monkeypatch, caplog):
    auto, ids = SETTINGS | {"rotary": "auto"}, prompt(14)

    def chosen(model, **changes):
        return patch_model(model, **auto | changes).config.linear_attention.get("rotary", "keep")

    model = model_of("llama")
    assert chosen(model) == "undo"
    close(model(ids).logits, model_of("llama", **SETTINGS)(ids).logits, "the same as asked for by name")
    # Without a window nobody would know positions.
    assert chosen(model_of("llama"), window=None, sinks=0) == chosen(model_of("llama"), mix="window") == "keep"
    assert chosen(tiny_model("causal", "gpt2", attn_pdrop=0.0)) == "keep"
    assert not caplog.messages
    assert chosen(tiny_model("causal", "recurrent_gemma"), layers="all") == "keep"
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q.flip(-1), k * cos[:, None]))
    strange = model_of("llama")
    before = strange(ids).logits
    assert chosen(strange) == "keep"
    assert torch.equal(unpatch_model(strange)(ids).logits, before)
    assert [message.split(":")[0] for message in caplog.messages] == ["RecurrentGemmaForCausalLM", "LlamaForCausalLM"]
    assert "feature maps see rotated queries and keys" in caplog.text


def test_broken_and_empty_tokens_do_not_hide_the_rotation():
    """One row is padding that is 0, for longer than is looked at, and one is not finite."""
    model = model_of("llama", **SETTINGS)
    x = torch.randn(3, 90, 32)
    x[0, :80], x[1, 3], x[2, :80] = 0, torch.nan, 0
    with torch.no_grad():
        model(inputs_embeds=torch.zeros(1, 4, 32), use_cache=False)
        assert part_of(model.model.layers[0].self_attn).layout is None
        blind = copy.deepcopy(model)
        blind.model.layers[0].self_attn.q_proj.weight.zero_()
        blind(inputs_embeds=x[1:], use_cache=False)
        assert part_of(blind.model.layers[0].self_attn).layout == Layout("half")
        model(inputs_embeds=x, use_cache=False)
    assert part_of(model.model.layers[0].self_attn).layout == Layout("half")


def test_the_first_call_draws_no_random_numbers():
    model = model_of("llama", **SETTINGS)
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    model(prompt(5))
    assert torch.equal(torch.rand(3), want)


def test_transfer_teaches_what_the_layers_will_compute():
    """The output beside softmax's is the forward's; its weights are those of unrotated features."""
    ids = prompt(14, rows=2)
    model, seen = model_of("llama", **SETTINGS), []
    with torch.no_grad():
        want = tiny_model("causal", "llama")(ids).logits
        with teacher_forced(model, lambda part, own, softmax: seen.append((part, own))):
            close(model(ids, use_cache=False).logits, want, "the teacher's logits")
        part, q, k, v, call = seen_by_layers(model, ids)[0]
        assert torch.equal(seen[0][1], part(q, k, v, call))
        with weights_forced(model, lambda part, own, softmax: seen.append((part, own))):
            model(ids, use_cache=False)
        q, k = call.rotation.undo(q), call.rotation.undo(k)
        assert torch.equal(seen[2][1], attention_weights(part, q, k, torch.ones(q.shape[2], q.shape[2]).tril()))


@pytest.mark.parametrize(("kind", "angles"), [("llama", 1), ("gemma3_text", 2)])
def test_a_step_makes_turns_once_for_all_layers_of_one_rotation(kind, angles, monkeypatch):
    model, made = model_of(kind, **SETTINGS, layers="all"), []
    own = Rotation.of
    monkeypatch.setattr(Rotation, "of", lambda *given: made.append(own(*given)) or made[-1])
    with torch.inference_mode():
        cache = returned_cache(model(prompt(9), use_cache=True))
        for _ in range(2):
            made.clear()
            model(prompt(1), **{NAME: cache})
            assert len(made) == angles
    # Nothing of a forward is held when it is over.
    assert current.model is current.module is None


def test_a_call_past_the_hooks_is_refused():
    """Without them nobody knows the angles."""
    model = model_of("llama", **SETTINGS)
    module = model.model.layers[0].self_attn
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(UnsupportedError, match="`rotary` must be 'keep' where an attention module is not called"):
        linear_attention_forward(module, q, q[:, :2], q[:, :2], None)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:<class .torch.autograd.function.Function.*:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_model_computes_the_same():
    settings = SETTINGS | {"feature_map": "hedgehog"}
    model, ids = model_of("llama", **settings), prompt(14)
    with torch.no_grad():
        want = model_of("llama", **settings)(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        close(compiled(ids, use_cache=False).logits, want, "compiled from the first call")
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(compiled(ids, use_cache=False).logits, want, "compiled when the rotation is known")


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("task", "kind"), [(task, kind) for task in MAPPINGS for kind in registered(task)])
def test_every_architecture_is_served_or_refused_by_name(task, kind):
    if (task, kind) in NOT_BUILT:
        pytest.skip(NOT_BUILT[task, kind])

    def patched(rotary):
        model = tiny_model(task, kind)
        settings = {"feature_map": "norm_preserving", "rotary": rotary}
        if task == "causal":
            settings |= {"window": 3, "sinks": 1}
        found = [layer for layer in attention_layers(model) if layer.kind != "cross"]
        layers = None if any(layer.kind == "full" for layer in found) else "all"
        subject = Subject(patch_model(model, layers=layers, **settings), task)
        if task == "seq2seq" and not model.config.is_encoder_decoder:
            subject.task = "causal"
        subject.logits(subject.tokens())
        return subject

    try:
        before = patched("keep")
    except UnsupportedError as error:
        pytest.skip(str(error))
    try:
        subject = patched("undo")
    except UnsupportedError as error:
        found = str(error)
    else:
        found = ""
    assert found.startswith("`rotary` must be 'keep' or 'auto' where it cannot be told") == (kind in NOT_UNDONE)
    if found:
        return
    for check in checks_for(subject.task):
        try:
            check(subject)
        except Exception as error:
            with pytest.raises(type(error)):
                check(before)
