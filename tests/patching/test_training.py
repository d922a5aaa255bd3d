"""Training habits: Trainer, checkpointing, autocast, compile, LoRA, data parallelism, packing."""

import copy
import os
from itertools import pairwise, product

import pytest
import torch
import torch.multiprocessing as mp
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache, Trainer, TrainingArguments

from hf_linear_attn import from_pretrained, patch_model, unpatch_model
from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.patching import convert, is_patched
from hf_linear_attn.patching.call_cache import NAME
from hf_linear_attn.patching.masks import enter_model, linear_attention_mask
from tests.processes import free_port, leave_group
from tests.spread import spread

from .checks import Graphs, Subject, close, grads_of, left_padding, loss_and_gradients, patched, same_gradients, some
from .zoo import tiny_model

SLOW = pytest.mark.slow
SETTINGS = some("learned", "window", "kept") | {"mixed": {"feature_map": "hedgehog", "layers": [1]}}
COMPILED = SETTINGS | {"mixed_window": SETTINGS["window"] | {"layers": [1]}}
KERNELS = {"kernels": {"feature_map": "norm_preserving", "window": 4, "sinks": 1, "backend": "triton"}}
RULED = SETTINGS | {"gated_delta": SETTINGS["window"] | {"update_rule": "gated_delta"}}


def build(setting="learned", name="llama"):
    return patched(tiny_model("causal", name), **({"layers": "all"} | (COMPILED | RULED | KERNELS)[setting]))


@pytest.mark.parametrize("setting", RULED)
def test_gradient_checkpointing_gives_the_same_gradients(setting):
    model = build(setting).train()
    ids = Subject(model, "causal").tokens()
    _, expected = loss_and_gradients(model, input_ids=ids)
    # The older name is deprecated in the newest Transformers, and the only one in the oldest.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    same_gradients(loss_and_gradients(model, input_ids=ids, use_cache=False)[1], expected)


@pytest.mark.parametrize("setting", RULED)
def test_autocast_stays_close_to_fp32(setting):
    model = build(setting)
    ids = Subject(model, "causal").tokens()
    expected, _ = loss_and_gradients(model, input_ids=ids)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(input_ids=ids, labels=ids).loss
    found.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    # bf16 keeps 8 bits.
    assert abs(found - expected) < 0.05 * expected
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("setting", RULED)
def test_half_precision_weights_train(setting, dtype, error):
    model = build(setting)
    ids = Subject(model, "causal").tokens()
    expected = loss_and_gradients(model, input_ids=ids)
    found = loss_and_gradients(model.to(dtype), input_ids=ids)
    assert abs(found[0] - expected[0]) < error * expected[0]
    for name, gradient in expected[1].items():
        assert found[1][name].dtype == dtype, name
        assert (found[1][name] - gradient).norm() < 5 * error * gradient.norm() + 1e-4, name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    after, _ = loss_and_gradients(model, input_ids=ids)
    assert after < found[0]


INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where a GPU is there")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "setting", "masked", "cached"),
    [
        *spread(product(["llama", "mistral", "gemma3_text"], COMPILED, [False, True], [False, True]), 7),
        ("llama", "gated_delta", True, False),
        pytest.param("llama", "kernels", True, False, marks=[SLOW, INTERPRETED]),
    ],
)
def test_compiled_training_has_one_graph_and_the_same_gradients(name, setting, masked, cached):
    model = build(setting, name)
    ids = Subject(model, "causal").tokens()
    mask = left_padding(ids, 3)
    more = {"use_cache": cached} | ({"attention_mask": mask} if masked else {})
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    expected, found = (loss_and_gradients(called, input_ids=ids, **more)[1] for called in (model, compiled))
    assert len(graphs) == 1
    same_gradients(found, expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("setting", "cache", "masked"),
    [
        *spread(product(COMPILED, [DynamicCache, StaticCache], [False, True]), 5),
        pytest.param("gated_delta", StaticCache, True, marks=SLOW),
    ],
)
def test_compiled_steps_have_no_break(setting, cache, masked):
    model = build(setting)
    subject = Subject(model, "causal")
    ids = subject.tokens()
    mask = left_padding(ids, 3 if masked else 0)
    expected = subject.logits(ids, attention_mask=mask, use_cache=False)
    options = {} if cache is DynamicCache else {"max_cache_len": 16}
    past = cache(config=model.config, **options)
    compiled = torch.compile(model, backend=Graphs(), fullgraph=True)
    found = []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 12)):
        more = {"attention_mask": mask[:, :end]} if masked else {}
        with torch.no_grad():
            found.append(compiled(input_ids=ids[:, start:end], **{NAME: past}, **more).logits)
    close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()], "compiled steps")


@pytest.mark.usefixtures("fresh_compiler")
@SLOW
@pytest.mark.parametrize("setting", ["learned", "window", "mixed"])
def test_compiled_packing_breaks_the_graph_but_not_the_result(setting):
    model = build(setting)
    ids = Subject(model, "causal").tokens(8, rows=1)
    positions = torch.cat([torch.arange(5), torch.arange(3)])[None]
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        compiled = torch.compile(model, backend=Graphs())
        compiled(input_ids=ids, use_cache=False)
        found = compiled(input_ids=ids, position_ids=positions, use_cache=False).logits
    close(found, expected, "compiled")


def sees_ahead(row, head, i, j):
    return (j <= i) | (j < 3)


def two_documents(row, head, i, j):
    return (j <= i) & ((i < 3) == (j < 3))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("pattern", [sees_ahead, two_documents])
def test_a_graph_of_one_sequence_refuses_other_patterns_when_it_runs(pattern):
    def mask():
        enter_model(torch.nn.Identity(), (), {})
        return linear_attention_mask(2, 6, 6, mask_function=pattern)

    with pytest.raises(UnsupportedError, match=r"`attention_mask` must be causal or bidirectional, .* got 'another pa"):
        torch.compile(mask, backend=Graphs(), fullgraph=True)()


def test_trainer_trains_and_saves(tmp_path):
    model = build("window")
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in Subject(model, "causal").tokens(8, rows=8)]
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_steps=3,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Trainer(model=model, args=settings, train_dataset=data).train()
    after = model.state_dict()
    learned = [name for name in after if "linear_attention" in name and after[name].is_floating_point()]
    assert learned
    assert all(not torch.equal(after[name], before[name]) for name in learned)
    assert (tmp_path / "checkpoint-3" / "modeling_linear_attention.py").exists()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT's own call
@pytest.mark.parametrize("setting", ["window", "mixed", "gated_delta"])
def test_lora_trains_on_top_and_merges(setting):
    from peft import LoraConfig, get_peft_model

    model = build(setting)
    ids = Subject(model, "causal").tokens()
    lora = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    lora(input_ids=ids, labels=ids).loss.backward()
    assert any(p.grad is not None and p.grad.any() for name, p in lora.named_parameters() if "lora_" in name)
    with torch.no_grad():
        expected = lora(input_ids=ids).logits
    merged = lora.merge_and_unload()
    subject = Subject(merged, "causal")
    close(subject.logits(ids), expected, "merged LoRA")
    assert torch.equal(subject.generate(ids), subject.generate(ids, use_cache=False))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT's own call
@pytest.mark.parametrize("disabled", [False, True], ids=["adapter", "no adapter"])
def test_layers_of_which_peft_trains_a_copy_are_unpatched(disabled, tmp_path):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        modules_to_save=["linear_attention"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    softmax = get_peft_model(tiny_model("causal", "llama"), settings).eval()
    torch.manual_seed(0)
    lora = get_peft_model(build("window"), settings).eval()
    lora.load_state_dict(softmax.state_dict(), strict=False)
    ids = Subject(lora, "causal").tokens()
    if disabled:
        softmax.base_model.disable_adapter_layers()
        lora.base_model.disable_adapter_layers()
    assert not torch.equal(Subject(lora, "causal").logits(ids), Subject(softmax, "causal").logits(ids))
    unpatch_model(lora.get_base_model())
    assert not is_patched(lora)
    assert torch.equal(Subject(lora, "causal").logits(ids), Subject(softmax, "causal").logits(ids))
    lora.save_pretrained(tmp_path)


@pytest.mark.parametrize("setting", RULED)
@pytest.mark.parametrize("flat", [False, True], ids=["position_ids", "collator"])
def test_packed_documents_equal_separate_ones(setting, flat):
    model = build(setting)
    subject = Subject(model, "causal")
    documents = [subject.tokens(n, seed=n, rows=1)[0] for n in (5, 3, 6)]
    expected = torch.cat([subject.logits(d[None]) for d in documents], dim=1)
    if flat:
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=True)
        batch = dict(collator([{"input_ids": d.tolist()} for d in documents]))
        batch.pop("labels")
    else:
        positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
        batch = {"input_ids": torch.cat(documents)[None], "position_ids": positions}
    with torch.no_grad():
        found = model(**batch, use_cache=False).logits
    close(found, expected, "packed documents")
    changed = dict(batch)
    changed["input_ids"] = batch["input_ids"].clone()
    changed["input_ids"][0, 1] = changed["input_ids"][0, 1] % 50 + 6
    with torch.no_grad():
        assert torch.equal(model(**changed, use_cache=False).logits[:, 5:], found[:, 5:]), "a document leaks"


@pytest.mark.parametrize("setting", ["learned", "window", "mixed"])
def test_packed_documents_do_not_go_into_one_cache(setting):
    model = build(setting)
    documents = [Subject(model, "causal").tokens(n, seed=n, rows=1)[0].tolist() for n in (5, 3)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": d} for d in documents])
    with pytest.raises(UnsupportedError, match=r"`cu_seq_lens_q` must be left out .* 2 packed .*use_cache=False"):
        model(**batch)
    model(**batch, use_cache=False)
    alone = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": documents[0]}])
    close(model(**alone).logits, model(**alone, use_cache=False).logits, "one document and a cache")


def test_packed_documents_train_as_separate_ones():
    model = build("window")
    subject = Subject(model, "causal")
    documents = [subject.tokens(n, seed=n, rows=1)[0] for n in (5, 3)]
    weights = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    separate = torch.cat([model(input_ids=d[None]).logits for d in documents], dim=1)
    (separate * weights).sum().backward()
    expected = copy.deepcopy(grads_of(model))
    model.zero_grad()
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    packed = model(input_ids=torch.cat(documents)[None], position_ids=positions, use_cache=False).logits
    (packed * weights).sum().backward()
    same_gradients(grads_of(model), expected)


def _two_processes(rank, port, expected, ids):
    """Check data parallelism through Accelerate, then full sharding, in one of two processes."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()} | {"ACCELERATE_USE_CPU": "true"})
    torch.set_num_threads(1)
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard

    mine = ids[rank : rank + 1]
    accelerator = Accelerator(cpu=True)
    model = build("window")
    parallel = accelerator.prepare(model)
    accelerator.backward(parallel(input_ids=mine, labels=mine).loss)
    same_gradients(grads_of(model), expected)

    model = build("window")
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    model(input_ids=mine, labels=mine).loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    same_gradients(found, expected)
    leave_group()


@SLOW
def test_two_processes_give_the_gradients_of_one():
    model = build("window")
    ids = Subject(model, "causal").tokens()
    _, expected = loss_and_gradients(model, input_ids=ids)
    mp.spawn(_two_processes, args=(free_port(), expected, ids), nprocs=2)


@pytest.mark.filterwarnings("ignore:.*being on a device type different")  # what Transformers 5.17 says of offloading
@pytest.mark.parametrize("setting", ["learned", "window", "mixed"])
def test_weights_that_are_offloaded_are_there_when_they_are_needed(setting, tmp_path):
    """Accelerate fetches a module's weights around its forward; those of feature maps are needed without one."""
    from accelerate import cpu_offload, disk_offload

    model = build(setting)
    subject = Subject(model, "causal")
    ids = subject.tokens()
    expected, text = subject.logits(ids), subject.generate(ids)
    cpu, disk = (Subject(copy.deepcopy(model), "causal") for _ in range(2))
    cpu_offload(cpu.model, execution_device=torch.device("cpu"))
    disk_offload(disk.model, tmp_path, execution_device=torch.device("cpu"))
    for offloaded in (cpu, disk):
        assert {p.device.type for p in offloaded.model.parameters()} == {"meta"}
        # Loops read weights where they lie: of those that come and go, PyTorch's operations take over.
        close(offloaded.logits(ids), expected, "logits")
        assert torch.equal(offloaded.generate(ids), text)


def test_a_device_map_with_a_disk_loads_and_runs(tmp_path):
    model = build("window")
    model.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.1": "disk", "lm_head": "cpu"}
    loaded = from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
    assert {p.device.type for p in loaded.model.layers[1].parameters()} == {"meta"}
    ids = Subject(model, "causal").tokens()
    close(Subject(loaded.eval(), "causal").logits(ids), Subject(model, "causal").logits(ids), "a layer on disk")


@pytest.mark.parametrize("setting", [None, "learned", "window", "kept", "gated_delta", "mixed"])
@pytest.mark.parametrize("bounds", [(0, 4, 12, 20), (0, *range(9, 21))], ids=["pieces", "steps"])
def test_gradients_go_back_through_a_cache(setting, bounds):
    model = (tiny_model("causal", "llama") if setting is None else build(setting)).double()
    embedded = model.get_input_embeddings()(torch.arange(3, 23)[None]).detach().requires_grad_()

    def gradient(pieces):
        cache = DynamicCache(config=model.config)
        for start, end in pieces:
            logits = model(inputs_embeds=embedded[:, start:end], use_cache=True, **{NAME: cache}).logits
        return torch.autograd.grad(logits[:, -1].logsumexp(-1).sum(), embedded)[0]

    torch.testing.assert_close(gradient(pairwise(bounds)), gradient([(0, 20)]), rtol=1e-7, atol=1e-10)


def test_dropout_of_attention_weights_is_told_once_to_have_no_effect(caplog):
    convert._warn_of_dropout.cache_clear()
    patch_model(tiny_model("causal", "llama"))
    assert not caplog.messages
    for _ in range(2):
        patch_model(tiny_model("causal", "llama", attention_dropout=0.25))
    assert caplog.messages == [
        "LlamaForCausalLM: attention_dropout=0.25 has no effect on converted layers, which compute no attention "
        "weights to drop"
    ]
