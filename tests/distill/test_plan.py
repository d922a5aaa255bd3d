import re

import pytest
import torch
from transformers import CLIPTextConfig, GPT2Config, Llama4Config, LlamaConfig, MambaConfig

from hf_linear_attn import patch_model
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill import trace as tracing
from hf_linear_attn.distill.cli import plan as main
from hf_linear_attn.distill.plan import GIB, plan
from hf_linear_attn.distill.recipes import RECIPES, recipes
from hf_linear_attn.errors import ArgumentError
from tests.distill.peaks import measured_bytes, two_steps
from tests.distill.tiny import tiny_multimodal, tiny_teacher
from tests.spread import spread

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
# As wide, and quickly planned.
WIDE = LlamaConfig(**LLAMA_8B | {"vocab_size": 4096, "num_hidden_layers": 1})


SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 704}
LLAMA = LlamaConfig(**SMALL, vocab_size=4096, num_hidden_layers=4)
GPT2 = GPT2Config(vocab_size=8192, n_embd=256, n_head=8, n_layer=6, bos_token_id=0, eos_token_id=0)
MEASURED = (
    (LLAMA, "float32", two_steps("recommended", stages=["transfer"])),
    (GPT2, "float32", two_steps("recommended", stages=["distill"], gradient_checkpointing=True)),
    (LLAMA, "bfloat16", two_steps("single_gpu", stages=["distill"])),
)


@pytest.mark.parametrize(("config", "dtype", "settings"), spread(MEASURED, 3))
def test_what_is_counted_is_what_a_run_holds(config, dtype, settings):
    measured = measured_bytes(config, getattr(torch, dtype), settings)
    sized = type(config).from_dict(config.to_dict() | {"dtype": dtype})
    assert plan(sized, settings, gpus=1, device="cpu").total_gib * GIB == pytest.approx(measured, rel=0.05)


def test_what_kernels_allocate_is_counted_and_nothing_is_changed():
    pytest.importorskip("triton")
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, intermediate_size=512, num_hidden_layers=1, vocab_size=64
    )
    before = {(place, name): getattr(place, name) for place, name in CHANGED}
    # Rows of several spans, so that a CPU has fewer features at once than it makes.
    settings = DistillationSettings(block_tokens=3072, rows=1, stages=["distill"], length_factors=[1])
    kernels, cpu = (plan(config, settings, device=device).total_gib for device in ("cuda", "cpu"))
    torch_alone = plan(config, settings.with_changes(backend="torch")).total_gib
    assert {(place, name): getattr(place, name) for place, name in CHANGED} == before
    # A CPU reads span by span; PyTorch on a GPU keeps every feature.
    assert kernels < torch_alone
    assert cpu < torch_alone


CHANGED = [(tracing.spans, "walks"), (tracing.dispatch, "_obstacle"), (tracing.Launch, "run")]


def test_parameters_are_those_of_the_model_itself():
    teacher = tiny_teacher()
    found = plan(teacher.config, DistillationSettings(window=4, block_tokens=16))
    assert found.parameters == sum(p.numel() for p in teacher.parameters())
    student = patch_model(teacher, feature_map="norm_preserving", window=4, sinks=4)
    maps = sum(p.numel() for name, p in student.named_parameters() if "linear_attention" in name)
    assert found.feature_map_parameters == maps


def test_weights_of_a_wide_model():
    settings = DistillationSettings(shard=True, gradient_checkpointing=True, mixed_precision="bf16")
    found = plan(WIDE, settings, tokens=1e9, gpus=8, tflops=1000, utilisation=0.5)
    transfer, distill = found.stages
    assert distill.memory_gib["teacher"] == pytest.approx(2 * found.parameters / 8 / GIB, rel=1e-3)
    everything = found.parameters + found.feature_map_parameters
    assert distill.memory_gib["student weights"] == pytest.approx(4 * everything / 8 / GIB, rel=1e-3)
    assert distill.memory_gib["Adam moments"] == pytest.approx(8 * everything / 8 / GIB, rel=1e-3)
    # 10 FLOP per parameter over a billion tokens, at 4 PFLOP/s in all.
    assert distill.hours == pytest.approx(10 * found.parameters * 1e9 / 4e15 / 3600)
    assert transfer.total_gib < distill.total_gib
    lora = plan(WIDE, DistillationSettings(stages=["distill"], trainable="lora", train_feature_maps=False)).stages[0]
    # Rank 8 on q, k, v, o.
    assert lora.trained_parameters == 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    # The frozen base serves the teacher too, and stays in bf16.
    assert lora.memory_gib["teacher"] == 0
    assert lora.memory_gib["student weights"] == pytest.approx(2 * found.parameters / GIB, rel=0.02)


@pytest.mark.slow
def test_8b_with_adapters_fits_one_gpu_of_40_gib():
    # A step of 4096 tokens, at once. Every layer adds as much, so that two of them tell of 32.
    settings = DistillationSettings.from_preset("single_gpu", stages=["distill"], block_tokens=4096, rows=1)
    one, two = (plan(LlamaConfig(**LLAMA_8B, num_hidden_layers=layers), settings) for layers in (1, 2))
    assert one.parameters + 31 * (two.parameters - one.parameters) == 8_030_261_248
    assert 15 < one.total_gib + 31 * (two.total_gib - one.total_gib) < 40


def test_weights_are_spread_over_gpus_where_they_are_sharded():
    def distill(gpus, **changes):
        return plan(WIDE, DistillationSettings(stages=["distill"], **changes), gpus=gpus).stages[0]

    one, copies, shards = distill(1), distill(8), distill(8, shard=True)
    assert copies.total_gib == one.total_gib
    assert shards.total_gib < one.total_gib
    assert copies.tokens == 8 * one.tokens
    assert copies.hours == pytest.approx(one.hours)


@pytest.mark.parametrize("config", [tiny_multimodal().config, Llama4Config()], ids=lambda config: config.model_type)
def test_a_multimodal_model_is_planned_by_its_language_model(config):
    sizes = config.get_text_config()
    sizes.num_hidden_layers = min(sizes.num_hidden_layers, 4)
    if hasattr(sizes, "layer_types"):
        sizes.layer_types = sizes.layer_types[:4]
    transfer, _ = plan(config, DistillationSettings.from_preset("lolcats", rows=1, block_tokens=64, window=8)).stages
    hidden = 2 * 64 * sizes.hidden_size
    assert transfer.memory_gib["activations"] * GIB > hidden
    assert transfer.trained_parameters > 0


def test_the_command_takes_what_distill_takes(tmp_path, capsys):
    tiny_teacher().config.save_pretrained(tmp_path)
    found = main([str(tmp_path), "--lora", "--block-tokens", "16", "--window", "4"])["plan"]
    assert found.table() in capsys.readouterr().out
    assert "| **total** |" in found.table()
    (tmp_path / "recipe.yaml").write_text(f"model: {tmp_path}\npreset: lolcats\nblock_tokens: 32\nwindow: 4\n")
    by_recipe = main([str(tmp_path / "recipe.yaml"), "--gpu-memory", "1"])["plan"]
    assert [stage.stage for stage in by_recipe.stages] == ["transfer", "distill"]
    assert by_recipe.stages[1].trained_parameters < found.parameters
    steps = DistillationSettings.from_preset("lolcats")
    assert [stage.tokens for stage in by_recipe.stages] == [4 * 32 * steps.transfer_steps, 4 * 32 * steps.distill_steps]
    with pytest.raises(ArgumentError, match="`model` must be given, got None"):
        main([])


def test_a_gpu_is_told_which_recipes_fit_it(tmp_path, capsys):
    WIDE.save_pretrained(tmp_path)
    flags = [str(tmp_path), "--block-tokens", "256", "--rows", "1", "--length-factors", "1", "--stages", "distill"]
    needs = {name: found.total_gib for name, found in main([*flags, "--gpu-memory", "80"]).items()}
    assert needs.keys() == RECIPES.keys() - {"recommended, sharded"}
    assert needs["recommended"] > needs["recommended, lean"] > needs["single_gpu"] > needs["single_gpu, nf4"]
    room = (needs["recommended"] + needs["recommended, lean"]) / 2
    capsys.readouterr()
    main([*flags, "--gpu-memory", str(room), "--trainable", "full"])
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"\| recommended \| no \|.*`--preset recommended --gradient-checkpointing` \|", "\n".join(lines))
    assert any(line.startswith("| recommended, lean | yes |") for line in lines)
    assert not any("single_gpu" in line for line in lines)
    for name, (start, changes) in RECIPES.items():
        DistillationSettings.from_preset(start, **changes)
        assert recipes()[name].items() >= changes.items()


@pytest.mark.slow
def test_a_gpu_that_nothing_fits_is_refused_with_what_would(tmp_path):
    WIDE.save_pretrained(tmp_path)
    flags = [str(tmp_path), "--rows", "1", "--length-factors", "1", "--stages", "distill", "--trainable", "full"]
    rule = "`gpu_memory` must hold the leanest recipe, 'recommended, lean', which needs .* GiB on each GPU, got 3.0. "
    with pytest.raises(ArgumentError, match=rule + r"Shard it over \d+ GPUs \(--shard"):
        main([*flags, "--block-tokens", "256", "--gpu-memory", "3"])
    adapters = [*flags[:-2], "--model-dtype", "bfloat16"]
    with pytest.raises(ArgumentError, match=r"Pass --block-tokens \d+\. Its flags, beside yours: --preset \w+ "):
        main([*adapters, "--block-tokens", "8192", "--gpu-memory", "1.2", "--trainable", "lora"])
    preset = [str(tmp_path), "--preset", "single_gpu", "--rows", "1", "--stages", "distill"]
    need = main(preset)["plan"].total_gib
    long = ["--block-tokens", "8192"]
    with pytest.raises(ArgumentError, match=r"`gpu_memory` must hold this run, .* Pass --block-tokens \d+\."):
        main([*preset, *long, "--gpu-memory", str(need / 0.9)])
    with pytest.raises(ArgumentError, match=r"`gpu_memory` must hold this run, .* `plan` then looks for recipes"):
        main([*preset, "--gpu-memory", "0.4"])
    with pytest.raises(ArgumentError, match="`gpu_memory` must be positive"):
        main([*flags, "--gpu-memory", "0"])


def test_configs_that_are_no_language_models_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="`utilisation` must be above 0 and at most 1, got"):
        plan(WIDE, utilisation=2)
    with pytest.raises(ArgumentError, match=r"`gpus` must be at least 1, got 0\. Leave it out"):
        plan(WIDE, gpus=0)
    with pytest.raises(ArgumentError, match="`block_tokens` must keep sequences within the model's 1024 positions, go"):
        plan(GPT2Config(), DistillationSettings(block_tokens=2048))
    with pytest.raises(ArgumentError, match="`model` must have attention to convert, got 'MambaConfig'"):
        plan(MambaConfig())
    with pytest.raises(ArgumentError, match="`config` must be a causal language model's, got 'CLIPTextConfig'"):
        plan(CLIPTextConfig())
    CLIPTextConfig().save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="`model` must be a causal language model's, got 'CLIPTextConfig'"):
        main([str(tmp_path)])


def test_memory_is_given_back_when_a_tensor_dies():
    with tracing.FakeTensorMode(), tracing.Tracker() as tracker:
        x = torch.empty(100)
        y = x + 1
        assert tracker.alive == tracker.peak == 800
        del y
        assert tracker.alive == 400
        x.view(10, 10)
    assert (tracker.alive, tracker.peak) == (400, 800)
