"""The launcher's configs that ship with the examples say what their comments say; no GPU is needed to read them."""

import os
import re
import subprocess
import sys
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


def started(tmp_path, *flags):
    """Run a script by the launcher, which says what process it is; without a GPU, whatever the machine has."""
    script = tmp_path / "who.py"
    script.write_text(
        "import os\n"
        "from hf_linear_attn.loading import process_state\n"
        "from hf_linear_attn.shell import shell\n"
        "with shell('who.py'):\n    state = process_state()\n"
        # In one piece: another process writes to the same pipe.
        "os.write(1, f'{state.process_index} of {state.num_processes} {state.device.type}\\n'.encode())\n"
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *flags, script]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(launcher, env=environment, capture_output=True, text=True, check=False)


def test_the_config_for_cpus_starts_several_processes(tmp_path):
    found = started(tmp_path, "--config_file", CONFIGS / "cpu.yaml", "--main_process_port", "0")
    assert sorted(found.stdout.splitlines()) == ["0 of 2 cpu", "1 of 2 cpu"], found.stderr[-2000:]


def test_a_launch_on_cpus_without_it_is_told_of_it(tmp_path):
    found = started(tmp_path, "--cpu", "--num_processes", "2")
    line = next(line for line in found.stderr.splitlines() if line.startswith("who.py: "))
    assert "`num_processes` must be 1" in line
    assert (CONFIGS.parents[1] / re.search(r"--config_file (\S+)", line)[1]).samefile(CONFIGS / "cpu.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_names_a_script_that_is_there(path):
    head = path.read_text().split("compute_environment")[0]
    assert f"--config_file examples/accelerate/{path.name}" in head
