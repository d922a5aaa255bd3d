"""The ranks that share a text, and what they exchange."""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from hf_linear_attn.errors import ArgumentError, TrainingError

GRACE_S = 10.0
"""Seconds that a rank which has failed waits for others to say that they live."""


class Ranks(ABC):
    """Several ranks, of which this is one.

    Args:
        rank: Its number; rank 0 has the beginning of every text.
        size: How many there are.

    Attributes:
        sent_bytes: Bytes that this rank has sent to the others, counted as they are handed over: in a ring of P ranks
            each hands its own on P - 1 times.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent_bytes = 0

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x``, ``[P, *]``; shapes and dtypes are the same on all."""
        self.sent_bytes += (self.size - 1) * x.nbytes
        return self._all_gather(x.contiguous())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of their ``x[rank]``, given ``x [P, *]``."""
        self.sent_bytes += (self.size - 1) * x[0].nbytes
        return self._reduce_scatter(x.contiguous())

    def gather(self, x: Tensor) -> Tensor:
        """Do as :meth:`all_gather`, with gradients: what others make of this rank's ``x`` comes back, summed."""
        found: Tensor = _Gather.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's ``x``, without gradient."""
        return self._sum(x.detach().clone())

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _sum(self, x: Tensor) -> Tensor: ...


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.reduce_scatter(dx), None


class Processes(Ranks):
    """The processes of a group.

    Args:
        group: A process group, or a device mesh of one dimension; None for all processes.

    Raises:
        ArgumentError: If there is no such group, or this process is not in it.
    """

    def __init__(self, group: ProcessGroup | DeviceMesh | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "group",
                "be that of several processes",
                None,
                "Start them with torchrun, and call torch.distributed.init_process_group first.",
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(
                    "group", "be a mesh of one dimension", group.mesh_dim_names, "Name one: mesh['cp']."
                )
            group = group.get_group()
        self.group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(self.group)
        if rank < 0:
            raise ArgumentError("group", "hold this process", dist.get_rank(), "Pass each process its own group.")
        super().__init__(rank, dist.get_world_size(self.group))
        members = dist.get_process_group_ranks(self.group)  # type: ignore[arg-type]
        self.name = "hf_linear_attn/" + "-".join(map(str, members))

    @override
    def _all_gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, *x.shape)
        try:
            dist.all_gather(list(found), x, group=self.group)
        except RuntimeError as error:
            raise self._failure(error) from error
        return found

    @override
    def _reduce_scatter(self, x: Tensor) -> Tensor:
        found = torch.empty_like(x[0])
        try:
            dist.reduce_scatter(found, list(x), group=self.group)
        except RuntimeError as error:
            raise self._failure(error) from error
        return found

    @override
    def _sum(self, x: Tensor) -> Tensor:
        try:
            dist.all_reduce(x, group=self.group)
        except RuntimeError as error:
            raise self._failure(error) from error
        return x

    def _failure(self, error: RuntimeError) -> TrainingError:
        """Say which ranks are gone. Those that live come here, too, and leave word in the store that all share."""
        lost = self._silent()
        numbers = ", ".join(map(str, lost)) if lost else "unknown"
        return TrainingError(
            "group",
            "be alive",
            f"rank {numbers} of {self.size} gone or silent",
            "Its own output says why; start all ranks again, and the run goes on from its last checkpoint. "
            f"This one was told: {str(error).splitlines()[0][:200]}",
            where=f"rank {self.rank}",
        )

    def _silent(self) -> list[int]:
        """Return the ranks that have not said within a moment that they have failed, and so live."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{self.name}/{self.rank}", "lives")
            until = time.monotonic() + GRACE_S
            others = [rank for rank in range(self.size) if rank != self.rank]
            while others and time.monotonic() < until:
                others = [rank for rank in others if not store.check([f"{self.name}/{rank}"])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            # The process that keeps the store is gone.
            return [0]
        return others
