"""The ranks that share a text, and what they exchange."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from hf_linear_attn.errors import ArgumentError, TrainingError

BEAT_S = 0.5
"""Seconds between two signs of life."""


_uses: dict[str, int] = {}


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

    def send(self, x: Tensor, sender: int, receiver: int) -> Tensor:
        """Return what the sender has as ``x`` where this is the receiver, and ``x`` elsewhere; all ranks call it."""
        self.sent_bytes += x.nbytes if self.rank == sender else 0
        return self._send(x.contiguous(), sender, receiver)

    def hand_on(self, x: Tensor, sender: int) -> Tensor:
        """Do as :meth:`send` to the next rank, with gradients: those of that one come back to the sender."""
        found: Tensor = _HandOn.apply(x, sender, self)  # type: ignore[no-untyped-call]
        return found

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's ``x``, without gradient."""
        return self._sum(x.detach().clone())

    def close(self) -> None:  # noqa: B027 - most have nothing to let go
        """Let go of what the ranks hold."""

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _send(self, x: Tensor, sender: int, receiver: int) -> Tensor: ...

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


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sender: int, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.sender = ranks, sender
        found = ranks.send(x, sender, sender + 1)
        return found.view_as(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, None, None]:
        dx = ctx.ranks.send(dx, ctx.sender + 1, ctx.sender)
        return dx if ctx.ranks.rank == ctx.sender else torch.zeros_like(dx), None, None


class Processes(Ranks):
    """The processes of a group.

    Args:
        group: A process group, or a device mesh of one dimension; None for all processes.

    Raises:
        ArgumentError: If there is no such group, or this process is not in it.
    """

    def __init__(self, group: ProcessGroup | DeviceMesh | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            remedy = "Start them with torchrun, and call torch.distributed.init_process_group first."
            raise ArgumentError("group", "be that of several processes", None, remedy)
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
        # Every process counts the uses of a group alike: what one left in the store is not the next one's.
        name = "hf_linear_attn/" + "-".join(map(str, members))
        _uses[name] = _uses.get(name, 0) + 1
        self.pulse = Pulse(f"{name}/{_uses[name]}", self.rank, self.size)

    @override
    def _all_gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, *x.shape)
        with self._exchange():
            dist.all_gather(list(found), x, group=self.group)
        return found

    @override
    def _reduce_scatter(self, x: Tensor) -> Tensor:
        found = torch.empty_like(x[0])
        with self._exchange():
            dist.reduce_scatter(found, list(x), group=self.group)
        return found

    @override
    def _send(self, x: Tensor, sender: int, receiver: int) -> Tensor:
        with self._exchange():
            if self.rank == sender:
                dist.send(x, group=self.group, group_dst=receiver)
            elif self.rank == receiver:
                x = torch.empty_like(x)
                dist.recv(x, group=self.group, group_src=sender)
        return x

    @override
    def _sum(self, x: Tensor) -> Tensor:
        with self._exchange():
            dist.all_reduce(x, group=self.group)
        return x

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Count an exchange, and say which ranks are gone where it fails."""
        self.pulse.exchanges += 1
        try:
            yield
        except RuntimeError as error:
            raise TrainingError(
                "group",
                "be alive and in step",
                self.pulse.blame(),
                "Its own output says why; start all ranks again, and a run goes on from its last checkpoint. "
                f"This one was told: {str(error).splitlines()[0][:200]}",
                where=f"rank {self.rank}",
            ) from error

    @override
    def close(self) -> None:
        self.pulse.stop()


class Pulse:
    """Signs of life in the store that all processes share, from a thread beside the work.

    What a backend says of a lost connection names no rank, and a rank without a connection to the lost one hears of it
    last, when others have left too. So the first to miss a rank leaves its number for all.

    Attributes:
        exchanges: Exchanges that this process has begun: who hangs has begun fewer than the others.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.exchanges = 0
        self._store = dist.distributed_c10d._get_default_store()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="hf_linear_attn pulse", daemon=True)
        self._say(0)
        self._thread.start()

    def _say(self, beat: int) -> None:
        self._store.set(f"{self.name}/{self.rank}", f"{beat} {self.exchanges}")

    def _live(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_S):
            beat += 1
            try:
                self._say(beat)
            except RuntimeError:
                # The process that keeps the store is gone: ranks that wait for it hear of it.
                return

    def stop(self) -> None:
        """End the signs of life."""
        self._ended.set()
        self._thread.join()

    def _heard(self) -> list[tuple[int, int]]:
        """Return the last beat of each rank, and the exchanges that it has begun."""
        words = (self._store.get(f"{self.name}/{rank}").decode().split() for rank in range(self.size))
        return [(int(beat), int(exchanges)) for beat, exchanges in words]

    def blame(self) -> str:
        """Say which ranks give no more signs of life; where all do, which are behind."""
        known = f"{self.name}/lost"
        try:
            if not self._store.check([known]):
                before = self._heard()
                time.sleep(4 * BEAT_S)
                now = self._heard()
                gone = [rank for rank in range(self.size) if now[rank][0] == before[rank][0] and rank != self.rank]
                # Others wait in the exchange that these have not come to, or further on.
                least, most = (find(exchanges for _, exchanges in now) for find in (min, max))
                behind = [rank for rank in range(self.size) if now[rank][1] == least < most]
                ranks, what = (gone, "gone") if gone else (behind, "behind")
                found = f"rank {', '.join(map(str, ranks))} of {self.size} {what}" if ranks else "all, out of step"
                self._store.compare_set(known, "", found)
            return self._store.get(known).decode()
        except RuntimeError:
            # With the store goes the process that keeps it: the first one.
            return f"rank 0 of {self.size} gone"
