"""Who is blamed where ranks are lost: several in one process, with a store of their own."""

import pytest
import torch.distributed as dist

from hf_linear_attn.parallel import ranks


@pytest.fixture
def pulses(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(ranks, "BEAT_S", 0.2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    made = [ranks.Pulse("group", rank, 3) for rank in range(3)]
    yield made
    for pulse in made:
        pulse.stop()


def test_who_gives_no_more_signs_of_life_is_gone(pulses):
    pulses[2].stop()
    assert pulses[0].blame() == "rank 2 of 3 gone"
    # Whoever hears of it later, when others have left too, says the same.
    pulses[0].stop()
    assert pulses[1].blame() == "rank 2 of 3 gone"


def test_who_has_begun_fewer_exchanges_is_behind(pulses):
    for pulse in (pulses[0], pulses[2]):
        pulse.exchanges = 5
        # As its next beat will, whenever that comes.
        pulse._say(1)
    assert pulses[2].blame() == "rank 1 of 3 behind"


def test_ranks_that_are_in_step_are_told_so(pulses):
    assert pulses[1].blame() == "all, out of step"


def test_without_the_store_the_first_rank_is_gone(pulses, monkeypatch):
    def lost(*names):
        raise RuntimeError("connection lost")

    monkeypatch.setattr(pulses[1], "_store", type("Lost", (), {"check": lost})())
    assert pulses[1].blame() == "rank 0 of 3 gone"
