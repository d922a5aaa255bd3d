"""How long a plan would take, counted in clocks and bytes, and the cut into segments that takes the least.

A walk is bound by its instructions or by memory, whichever takes longer. Programs here have all the registers that a
processor gives out to eight warps, too few to fill its issue slots: a warp waits for memory, for products and for its
own last result before it goes on. The figures are few and rough, to tell a good cut from a bad one: times measured on
an H100 lie within a factor of 1.4 of them (tested), and of other cuts none were measured. What a rule of a few lines
would lose is in docs/results/notebook.md.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hf_linear_attn.ops.triton.plan import HELD_WARPS, WIDEST, Problem, Target


class Processor(NamedTuple):
    """What time is counted with.

    Attributes:
        clocks: Clocks per microsecond.
        moved: Bytes that memory moves per microsecond.
        cache: Bytes of the last cache before memory.
        instructions: Instructions in proportion to those of Hopper, whose matrix units take tiles from shared memory.
    """

    clocks: float
    moved: float
    cache: float
    instructions: float


PROCESSORS = {
    "sm_80": Processor(1410, 1.9e6, 40e6, 1.6),
    "sm_86": Processor(1695, 0.9e6, 6e6, 1.6),
    "sm_89": Processor(2520, 0.95e6, 72e6, 1.6),
    "sm_90": Processor(1755, 2.9e6, 50e6, 1.0),
    "gfx942": Processor(2100, 4.0e6, 256e6, 1.6),
    "interpreter": Processor(1000, 1e6, 1e6, 1.0),
}
"""Boost clocks, and nine tenths of what data sheets say of memory; of sm_90, what a copy moved on an H100."""

CACHED = 3.0
"""How many times as fast the cache is as memory."""

CLOCKS = {
    **{"state": 0.04, "reverse_state": 0.054},
    **{"forward": 0.073, "dq": 0.055, "dk": 0.085, "dv": 0.071},
    **{"stored_forward": 0.045, "stored_dq": 0.039, "stored_dk": 0.055, "stored_dv": 0.052, "stored_dkv": 0.05},
}
"""Clocks for issue per number that a kernel touches, on Hopper: fitted to compiled instruction counts."""

IDENTITY = 0.6
"""Share of them that is left where q and k are features already."""

ROUND = 1400
"""Clocks until memory answers."""

GAP = 10.0
"""Clocks from one instruction of a warp to its next, fitted to what further tokens took on an H100."""

SCHEDULERS = 4
"""Instructions that a processor issues per clock, of as many warps."""

START_US = 1.5
"""Microseconds until a launch has replaced the one before."""

STORED_LENGTHS = (128, 256, 512)
"""Tokens per segment that are considered where states are read; all are multiples of that walk's tiles."""


class Work(NamedTuple):
    """One launch, in the terms of the model.

    Attributes:
        role: Name of the kernel.
        programs: Size of its grid.
        clocks: That one program issues for, on Hopper, were there no gaps.
        warps: Of a program.
        moved: Bytes of tensors, which cross memory.
        states: Bytes of states, which the next launch reads: they stay in the cache if half of it holds them.
        waits: Clocks that every program waits for memory, however few there are.
    """

    role: str
    programs: int
    clocks: float
    warps: int
    moved: float
    states: float
    waits: float = 0.0


class Cut(NamedTuple):
    """How sequences are cut.

    Attributes:
        stored: Whether states are stored for a walk to read, and not carried along in registers.
        length: Tokens per segment.
    """

    stored: bool
    length: int


def microseconds(target: Target, works: list[Work]) -> float:
    """Predict how long launches take, one after the other."""
    kind = PROCESSORS[target.arch]
    total = 0.0
    for work in works:
        beside = min(max(1, HELD_WARPS // work.warps), -(-work.programs // target.processors))
        rounds = -(-work.programs // (target.processors * beside))
        # Programs side by side fill each other's gaps.
        stretched = work.clocks * kind.instructions * max(beside, GAP * SCHEDULERS / work.warps)
        issued = (rounds * (ROUND + stretched) + work.waits) / kind.clocks
        states = work.states / (CACHED if work.states <= kind.cache / 2 else 1)
        # A processor without a program moves nothing.
        busy = min(1.0, work.programs / target.processors)
        total += START_US + max(issued, (work.moved + states) / kind.moved / busy)
    return total


class Costs:
    """What the launches of a problem cost, of which shapes alone matter, when its tokens are cut in one way."""

    def __init__(self, p: Problem, tokens: int, cut: Cut) -> None:
        self.p, self.tokens, self.cut = p, tokens, cut
        self.H, self.HKV, self.D, self.V = (int(n) for n in (p.q.shape[1], *p.k.shape[1::2], p.v.shape[3]))
        self.group, self.length = self.H // self.HKV, min(cut.length, tokens)
        pieces = -(-tokens // self.length)
        self.split, self.segments = pieces > 1, int(p.rows) * pieces
        if p.cu_seqlens is not None:
            self.segments = int(p.rows) + pieces * self.split

    def work(self, role: str, programs: int, numbers: float, crossing: tuple[float, float], states: int) -> Work:
        """Return a launch of so many programs per segment, each of which touches so many numbers.

        Numbers of queries and of keys cross memory per head and token; states are bytes per segment and key head.
        """
        clocks = CLOCKS[role] * numbers * (IDENTITY if self.p.phi == "identity" else 1.0)
        tokens = self.tokens * (1 if self.p.cu_seqlens is not None else int(self.p.rows))
        moved = tokens * (self.H * crossing[0] + self.HKV * crossing[1]) * self.p.q.element_size()
        warps, states = self.p.tile(role).warps, states * self.segments * self.HKV
        return Work(role, self.segments * programs, clocks, warps, moved, states)

    def sums(self, role: str) -> list[Work]:
        """Return the sums over segments, ``"state"`` or ``"reverse_state"``, and their scan."""
        tile, scan, D, V = self.p.tile(role), self.p.tile("scan"), self.D, self.V
        d, v, of_keys = min(tile.width, D), min(tile.width, V), role == "state"
        passes = -(-D // d) * (-(-V // v) if of_keys else 1)
        numbers = self.length * (d + v if of_keys else self.group * (d + 2 * V))
        crossing = (0, D + V) if of_keys else (D + 2 * V, 0)
        size, rows = (D + 1) * V, int(self.p.rows)
        states = self.segments * self.HKV * size * (4 + (self.p.q.element_size() if self.cut.stored else 4))
        waits = ROUND * (2 + self.segments // rows // scan.tokens)
        return [
            self.work(role, self.HKV * passes, numbers, crossing, 4 * size),
            Work("scan", rows * self.HKV * -(-size // scan.width), 0, scan.warps, 0, states, waits),
        ]

    def carried(self, role: str) -> Work:
        """Return a walk that carries its state."""
        D, V, of_keys, causal = self.D, self.V, role in ("dk", "dv"), self.p.causal
        tiled = V if role in ("forward", "dv") else D
        width = min(self.p.tile(role).width, tiled)
        d, v = (D, width) if role in ("forward", "dv") else (width, V)
        twice = 2 if role in ("dq", "dk") else 1
        numbers = twice * d + v + (self.group if of_keys else 1) * (d + v) * causal
        near, far = (twice * D + V, D + V) if causal else (numbers, 0)
        programs = (self.HKV if of_keys else self.H) * -(-tiled // width)
        crossing = (far, near) if of_keys else (near, far)
        return self.work(role, programs, numbers * self.length + D * V, crossing, 4 * D * V * self.split)

    def stored(self, role: str) -> Work:
        """Return a walk that reads its states."""
        D, V, tile = self.D, self.V, self.p.tile(role)
        kinds = role.removeprefix("stored_d")
        of_keys = kinds in ("k", "v", "kv")
        near = {"q": 2 * D + V, "k": 2 * D + V, "v": D + V, "kv": 3 * D + 2 * V}.get(kinds, D + V)
        seen = (self.length + min(tile.tokens, self.length)) / 2 * (1.5 if kinds == "kv" else 1)
        numbers = tile.tokens * near + D * V + (self.group if of_keys else 1) * seen * (D + V + tile.tokens)
        programs = (self.HKV if of_keys else self.H) * -(-self.length // tile.tokens)
        crossing = (D + V, near) if of_keys else (near, D + V)
        return self.work(role, programs, numbers, crossing, D * V * self.p.q.element_size())

    def works(self, role: str) -> list[Work]:
        """Return the launches for ``"forward"``, ``"dq"``, ``"dk"`` (with dv), or sums without causality."""
        if role in ("state", "reverse_state"):
            return self.sums(role)
        walks = ["dk", "dv"] if role == "dk" else [role]
        if self.cut.stored:
            walks = ["dkv"] if role == "dk" and self.p.has("stored_dkv") and not self.p.keys_apart else walks
            found = [self.stored("stored_" + walk) for walk in walks]
        else:
            found = [self.carried(walk) for walk in walks]
        if self.cut.stored or (self.p.causal and self.split):
            return [*self.sums("reverse_state" if role == "dk" else "state"), *found]
        return found


def cuts(p: Problem, tokens: int, role: str) -> Iterator[Cut]:
    """List the cuts that are considered for a walk, or for its sums, whole sequences first."""
    stored = p.causal and p.has("stored_" + role)
    # A walk that carries a state that fades does not fit into registers, nor one with as many features as that.
    if not stored or (p.log_decay is None and p.k.shape[3] <= WIDEST):
        yield Cut(False, tokens)
        chunk, pieces = p.tile(role).tokens, 2
        while tokens > pieces * chunk and pieces <= 4 * p.target.processors:
            yield Cut(False, -(-tokens // (pieces * chunk)) * chunk)
            pieces += max(1, pieces // 6)
    if stored:
        for length in STORED_LENGTHS:
            yield Cut(True, length)


def choose(p: Problem, *roles: str, stored: bool = False) -> Cut:
    """Return the cut that is predicted to take the least time; of equal ones, the first.

    Args:
        p: The problem.
        roles: What is cut alike: ``"forward"``, ``"dq"``, ``"dk"`` (with dv), or without causality ``"state"`` or
            ``"reverse_state"``; the last says which cuts are considered.
        stored: Whether states have to be stored.
    """
    tokens = int((p.k if roles[-1] in ("dk", "state") else p.q).shape[2])

    def us(cut: Cut) -> float:
        costs = Costs(p, tokens, cut)
        return microseconds(p.target, [work for role in roles for work in costs.works(role)])

    return min((cut for cut in cuts(p, tokens, roles[-1]) if cut.stored or not stored), key=us)


def stored_cut(p: Problem) -> Cut:
    """Cut sequences for a forward that reads its states."""
    return choose(p, "forward", stored=True)
