"""Ranks that are threads of one process."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.parallel import Ranks


class Meeting:
    """Where threads hand tensors round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size

    def all(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class Thread(Ranks):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.size)
        self.meeting = meeting

    def _all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([y.detach() for y in self.meeting.all(self.rank, x)])

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack([y[self.rank] for y in self.meeting.all(self.rank, x)]).sum(0)

    def _send(self, x: Tensor, sender: int, receiver: int) -> Tensor:
        found = self.meeting.all(self.rank, x)
        return found[sender].detach() if self.rank == receiver else x

    def _sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.all(self.rank, x)).sum(0)


def on_ranks(size: int, work: Callable[[Thread], Any]) -> list[Any]:
    """Call ``work`` with each of ``size`` ranks; raise what one of them raised."""
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            return work(Thread(meeting, rank))
        except threading.BrokenBarrierError as error:
            return error
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]


def copies(model: torch.nn.Module, size: int) -> Sequence[torch.nn.Module]:
    return [copy.deepcopy(model) for _ in range(size)]
