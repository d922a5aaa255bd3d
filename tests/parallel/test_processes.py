import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.distilling import go
from tests.processes import launch

# Processes that start together share the cores with whatever else runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_two_and_four_processes_are_one_and_a_dead_one_is_named():
    found = launch(4, "tests.parallel.workers")
    assert found == ["all is well", "all is well", "", "all is well"]


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_distillation_is_one_process_and_goes_on_where_it_was_killed(tmp_path):
    alone = go(tmp_path / "alone", 1)
    # Rank 0 stops in the midst of a stage that splits; the other hears of it.
    launch(2, "tests.parallel.distilling", tmp_path / "resumed", "killed", may_fail=True)
    assert not (tmp_path / "resumed" / "model.safetensors").exists()
    assert list((tmp_path / "resumed" / "checkpoints").iterdir())
    launch(2, "tests.parallel.distilling", tmp_path / "whole", "whole")
    losses = [float(line) for line in (tmp_path / "whole" / "losses.txt").read_text().split()]
    assert losses == pytest.approx([record["loss_nats"] for record in alone.history], rel=1e-4)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    for name, x in whole.items():
        assert torch.equal(x, resumed[name]), name
    # fp32 sums in another order, over eleven steps of Adam.
    for other in ("alone", "sharded"):
        for name, x in weights(tmp_path / other).items():
            torch.testing.assert_close(x, whole[name], rtol=1e-2, atol=1e-2)
