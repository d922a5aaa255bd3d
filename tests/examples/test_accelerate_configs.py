"""The launcher's configs that ship with the examples say what their comments say; no GPU is needed to read them."""

from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import StateDictType

CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate"


def launched(name):
    arguments = launch_command_parser().parse_args(["--config_file", str(CONFIGS / name), "script.py"])
    return _validate_launch_command(arguments)[0]


def test_the_sharded_config_is_fsdp2_with_whole_state_dicts(monkeypatch):
    arguments = launched("fsdp2.yaml")
    assert arguments.use_fsdp
    assert arguments.mixed_precision == "bf16"
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    assert not plugin.cpu_ram_efficient_loading


def test_the_config_for_distillation_leaves_sharding_and_precision_to_the_script():
    arguments = launched("multi_gpu.yaml")
    assert arguments.multi_gpu
    assert not arguments.use_fsdp
    assert arguments.mixed_precision == "no"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_names_a_script_that_is_there(path):
    head = path.read_text().split("compute_environment")[0]
    assert f"--config_file examples/accelerate/{path.name}" in head
