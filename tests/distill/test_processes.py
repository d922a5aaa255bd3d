import pytest
import torch

from hf_linear_attn import from_pretrained
from tests.distill.workers import run
from tests.processes import launch

# Processes that start together share the cores with whatever else runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def losses_of_two(folder, kind):
    """Run two processes; return the losses they saw."""
    launch(2, "tests.distill.workers", folder, kind)
    return [float(line) for line in (folder / "losses.txt").read_text().split()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, [record["loss_nats"] for record in run(str(folder), accumulation=2).history]


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_are_one_with_twice_the_accumulation(one_process, tmp_path, kind):
    folder, expected = one_process
    # fp32 sums in another order, over eight steps of Adam.
    assert losses_of_two(tmp_path, kind) == pytest.approx(expected, rel=1e-4)
    ids = torch.arange(3, 40)[None]
    one, two = (from_pretrained(path)(ids).logits for path in (folder, tmp_path))
    torch.testing.assert_close(two, one, rtol=1e-2, atol=1e-2)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
