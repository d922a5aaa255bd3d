"""One set of weights: a converted model is its softmax teacher again, for a while or in a model beside it."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill.lora import add_lora
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.evaluation.meters import cache_bytes
from hf_linear_attn.patching import is_patched, returned_cache, softmax, teacher_of
from hf_linear_attn.patching.cache import RECORDED

from .checks import cache_sizes, left_padding, prompt
from .zoo import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
OPTIONS = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
HYBRID = {"feature_map": "hedgehog", "window": 3, "sinks": 2}


def adapted(teacher, **settings):
    """Make a student of a frozen base, adapters and maps, as the preset single_gpu does, all of them trained a bit."""
    student = patch_model(copy.deepcopy(teacher), **settings)
    peft = add_lora(student, rank=2, alpha=4.0)
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_B" in name or "linear_attention" in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) / 4)
    return peft.eval()


def observed(model, ids):
    """Return logits, with padding and in a batch, hidden states and an answer."""
    mask = left_padding(ids, 4)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, output_hidden_states=True)
        return [model(ids).logits, out.logits, *out.hidden_states, model.generate(ids, attention_mask=mask, **OPTIONS)]


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("settings", [HYBRID, {"feature_map": "elu", "layers": [1]}], ids=["all", "mixed"])
def test_it_is_the_teacher_to_the_bit(name, attention, settings):
    teacher = tiny_model("causal", name)
    teacher.set_attn_implementation(attention)
    peft, ids = adapted(teacher, **settings), prompt(9, rows=2)
    student, expected = peft.get_base_model(), observed(teacher, ids)
    before = observed(student, ids)
    assert not equal(before, expected)
    beside = teacher_of(peft)
    with softmax(peft) as inside:
        assert inside is student
        assert not is_patched(student)
        assert type(student) is type(teacher)
        assert student.config.to_dict() == teacher.config.to_dict()
        assert equal(observed(student, ids), expected)
    assert equal(observed(beside, ids), expected)
    assert equal(observed(student, ids), before)


def test_encoders_are_their_teachers_too():
    teacher, ids = tiny_model("masked", "bert"), prompt(9, rows=2)
    student = patch_model(copy.deepcopy(teacher), "elu")
    with torch.no_grad(), softmax(student):
        assert torch.equal(student(ids).logits, teacher(ids).logits)
        assert student(ids, output_attentions=True).attentions is not None


def test_all_is_as_before_afterwards_whatever_happened(tmp_path):
    student = patch_model(tiny_model("causal", "llama"), **HYBRID)
    own = student.model.layers[0].self_attn.register_forward_pre_hook(lambda module, args: None)
    seen = SimpleNamespace(
        hooks=[(list(m._forward_pre_hooks.items()), list(m._forward_hooks.items())) for m in student.modules()],
        config=student.config.to_dict(),
        names=list(student.state_dict()),
        cls=type(student),
    )
    with contextlib.suppress(ZeroDivisionError), softmax(student):
        student.model.layers[1].self_attn.register_forward_pre_hook(lambda module, args: None)
        raise ZeroDivisionError
    hooks = [(list(m._forward_pre_hooks.items()), list(m._forward_hooks.items())) for m in student.modules()]
    assert sum(a != b for a, b in zip(hooks, seen.hooks, strict=True)) == 1
    assert (type(student), student.config.to_dict()) == (seen.cls, seen.config)
    assert list(student.state_dict()) == seen.names
    with softmax(student):
        own.remove()
    assert not any(own.id in m._forward_pre_hooks for m in student.modules())
    student.save_pretrained(tmp_path)
    loaded, ids = from_pretrained(tmp_path).eval(), prompt(9, rows=2)
    assert equal(observed(student, ids), observed(loaded, ids))


def test_the_teacher_saved_inside_is_a_softmax_folder(tmp_path):
    teacher = tiny_model("causal", "llama")
    student = patch_model(copy.deepcopy(teacher), **HYBRID)
    with softmax(student):
        student.save_pretrained(tmp_path)
    loaded, ids = type(teacher).from_pretrained(tmp_path).eval(), prompt(9, rows=2)
    assert not is_patched(loaded)
    assert equal(observed(loaded, ids), observed(teacher, ids))


def test_what_adapters_learn_is_left_as_it_was():
    peft = adapted(tiny_model("causal", "llama"), **HYBRID)
    learns = {name: p.requires_grad for name, p in peft.named_parameters()}
    with peft.disable_adapter():
        off = [m._disable_adapters for m in peft.modules() if hasattr(m, "_disable_adapters")]
        learns_off = {name: p.requires_grad for name, p in peft.named_parameters()}
        with softmax(peft):
            pass
        assert [m._disable_adapters for m in peft.modules() if hasattr(m, "_disable_adapters")] == off
        assert {name: p.requires_grad for name, p in peft.named_parameters()} == learns_off
    with softmax(peft):
        pass
    assert {name: p.requires_grad for name, p in peft.named_parameters()} == learns


def storages(*models):
    tensors = (x for model in models for xs in (model.parameters(), model.buffers()) for x in xs)
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def test_drafts_need_adapters_maps_and_states_beside_the_teacher():
    plain = tiny_model("causal", "llama")
    peft, ids = adapted(plain, **HYBRID), prompt(1500)
    student = peft.get_base_model()
    student.generation_config.num_assistant_tokens = 3
    teacher = teacher_of(peft)
    added = sum(storages(teacher, peft).values()) - sum(storages(plain).values())
    learned = [p for n, p in peft.named_parameters() if "lora_" in n or "linear_attention" in n]
    buffers = [x for n, x in peft.named_buffers() if "linear_attention" in n]
    assert added == sum(x.nbytes for x in (*learned, *buffers))
    with cache_sizes(student) as held:
        found = teacher.generate(ids, assistant_model=student, **OPTIONS)
    assert torch.equal(found, plain.generate(ids, **OPTIONS))
    with torch.no_grad():
        keys, state = (cache_bytes(returned_cache(m(ids, use_cache=True))) for m in (teacher, student))
    # A state, one to go back to, and the keys of the last tokens.
    assert max(held) <= 2 * state + keys * 2 * RECORDED / ids.shape[1]
    assert teacher.lm_head.weight is student.lm_head.weight


def test_what_is_no_student_is_refused_in_a_line():
    model = tiny_model("causal", "llama")
    for use in (teacher_of, lambda m: softmax(m).__enter__()):
        with pytest.raises(ArgumentError, match=r"^`model` must have a converted layer, got 'LlamaForCausalLM'\. A so"):
            use(model)
        with pytest.raises(ArgumentTypeError, match=r"^`model` must be a patched Transformers model, got 'Linear'\."):
            use(nn.Linear(2, 2))
        peft = adapted(model, **HYBRID)
        peft.merge_adapter()
        with pytest.raises(ArgumentError, match=r"^`model` must have adapters that are not merged, .*q_proj\)\. Load"):
            use(peft)
