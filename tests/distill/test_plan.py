import pytest
from transformers import CLIPTextConfig, GPT2Config, Llama4Config, LlamaConfig, MambaConfig

from hf_linear_attn import patch_model
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.cli import plan as main
from hf_linear_attn.distill.plan import GIB, plan
from hf_linear_attn.errors import ArgumentError
from tests.distill.tiny import tiny_multimodal, tiny_teacher

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)


def test_parameters_are_those_of_the_model_itself():
    teacher = tiny_teacher()
    found = plan(teacher.config, DistillationSettings(window=4))
    assert found.parameters == sum(p.numel() for p in teacher.parameters())
    student = patch_model(teacher, feature_map="norm_preserving", window=4, sinks=4)
    maps = sum(p.numel() for name, p in student.named_parameters() if "linear_attention" in name)
    assert found.feature_map_parameters == maps


def test_llama_8b():
    found = plan(LLAMA_8B, tokens=1e9, gpus=8, tflops=1000, utilisation=0.5)
    assert found.parameters == 8_030_261_248
    transfer, distill = found.stages
    assert distill.memory_gib["teacher"] == pytest.approx(2 * found.parameters / 8 / GIB)
    everything = found.parameters + found.feature_map_parameters
    assert distill.memory_gib["Adam moments"] == pytest.approx(8 * everything / 8 / GIB, rel=0.02)
    # 10 FLOP per parameter over a billion tokens, at 4 PFLOP/s in all.
    assert distill.hours == pytest.approx(10 * found.parameters * 1e9 / 4e15 / 3600)
    assert transfer.total_gib < distill.total_gib
    lora = plan(LLAMA_8B, DistillationSettings(trainable="lora", train_feature_maps=False), gpus=8).stages[1]
    # Rank 8 on q, k, v, o.
    assert lora.trained_parameters == 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024))


def test_more_gpus_need_less_memory_each_and_less_time():
    one, eight = plan(LLAMA_8B, gpus=1).stages[1], plan(LLAMA_8B, gpus=8).stages[1]
    assert one.total_gib > eight.total_gib
    assert one.hours == pytest.approx(8 * eight.hours)


@pytest.mark.parametrize("config", [tiny_multimodal().config, Llama4Config()], ids=lambda config: config.model_type)
def test_a_multimodal_model_is_planned_by_its_language_model(config):
    sizes = config.get_text_config()
    transfer, _ = plan(config, DistillationSettings.from_preset("lolcats", rows=1, block_tokens=64)).stages
    hidden = 2 * 64 * sizes.hidden_size
    assert transfer.memory_gib["activations"] * GIB > hidden
    assert transfer.trained_parameters > 0


def test_command_prints_the_plan(tmp_path, capsys):
    tiny_teacher().config.save_pretrained(tmp_path)
    found = main([str(tmp_path), "--lora", "--gpus", "2"])
    assert found.table() in capsys.readouterr().out
    assert "| **total** |" in found.table()
    (tmp_path / "recipe.yaml").write_text(f"model: {tmp_path}\npreset: lolcats\nblock_tokens: 32\n")
    by_recipe = main([str(tmp_path / "recipe.yaml"), "--gpus", "2"])
    assert [stage.stage for stage in by_recipe.stages] == ["transfer", "distill"]
    assert by_recipe.stages[1].trained_parameters < found.parameters
    with pytest.raises(ArgumentError, match="`model` must be given, got None"):
        main([])


def test_configs_that_are_no_language_models_are_refused():
    with pytest.raises(ArgumentError, match="`utilisation` must be positive"):
        plan(LLAMA_8B, utilisation=2)
    with pytest.raises(
        ArgumentError, match="`block_tokens` must keep sequences within the model's 1024 positions, got 2"
    ):
        plan(GPT2Config(), DistillationSettings(block_tokens=2048))
    with pytest.raises(ArgumentError, match="`model` must have attention to convert, got 'MambaConfig'"):
        plan(MambaConfig())
    with pytest.raises(ArgumentError, match="`config` must be a causal language model's, got 'CLIPTextConfig'"):
        plan(CLIPTextConfig())
