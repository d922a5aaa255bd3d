"""How long a plan would take, counted in clocks and bytes, and the cut into segments that takes the least.

A walk is bound by its instructions or by memory, whichever takes longer. Programs here have all the registers that a
processor gives out to eight warps, which are too few to fill its issue slots: a warp waits for memory, for products and
for its own last result before it goes on. The figures here are few
and rough: they are to tell a good cut from a bad one. Compiled instruction counts lie within a factor of 1.7 of them,
and times that were measured on an H100 within one of 1.4 (both tested).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hf_linear_attn.ops.triton.plan import Problem, Target


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
"""By architecture: boost clocks, and about nine tenths of what the data sheet of its largest part says of memory; of
sm_90, what a copy moved on an H100."""

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

HELD_WARPS = 8
"""Warps that a processor holds of these kernels, for their registers."""

GAP = 10.0
"""Clocks from one instruction of a warp to its next, its waits for memory among them.

Fitted to what further tokens took on an H100 with eight key heads of 128; those with 32 key heads test it.
"""

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
    states: float = 0.0
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
    """What the launches of a problem cost, by their cut.

    Args:
        p: The problem; only its shapes matter.
    """

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.H, self.HKV = int(p.q.shape[1]), int(p.k.shape[1])
        self.D, self.V = int(p.k.shape[3]), int(p.v.shape[3])
        self.T, self.S = int(p.q.shape[2]), int(p.k.shape[2])
        self.rows, self.group = int(p.rows), self.H // self.HKV
        self.size = p.q.element_size()
        self.packed = p.cu_seqlens is not None
        self.share = IDENTITY if p.phi == "identity" else 1.0

    def count(self, tokens: int, length: int) -> int:
        """Return the number of segments."""
        if self.packed:
            return -(-tokens // length) + self.rows if length < tokens else self.rows
        return self.rows * -(-tokens // length)

    def crossing(self, tokens: int, queries: float, keys: float) -> float:
        """Return the bytes of so many numbers per query head and token, and per key head and token."""
        batch = 1 if self.packed else self.rows
        return batch * tokens * (self.H * queries + self.HKV * keys) * self.size

    def state(self, role: str, tokens: int, length: int) -> Work:
        """Return the sums over segments."""
        tile, segments = self.p.tile(role), self.count(tokens, length)
        BD = min(tile.width, self.D)
        if role == "state":
            BV = min(tile.width, self.V)
            passes, numbers, moved = (
                -(-self.D // BD) * -(-self.V // BV),
                BD + BV,
                self.crossing(tokens, 0, 1) * (self.D + self.V),
            )
        else:
            passes, numbers = -(-self.D // BD), self.group * (BD + 2 * self.V)
            moved = self.crossing(tokens, self.D + 2 * self.V, 0)
        states = segments * self.HKV * (self.D + 1) * self.V * 4
        clocks = self.share * CLOCKS[role] * min(length, tokens) * numbers
        return Work(role, segments * self.HKV * passes, clocks, tile.warps, moved, states)

    def scan(self, tokens: int, length: int, *, stored: bool) -> Work:
        """Return the scan over segments."""
        tile, segments = self.p.tile("scan"), self.count(tokens, length)
        numbers = (self.D + 1) * self.V
        programs = self.rows * self.HKV * -(-numbers // tile.width)
        reads = 2 + segments // self.rows // tile.tokens
        written = self.size if stored else 4
        return Work("scan", programs, 0, tile.warps, 0, segments * self.HKV * numbers * (4 + written), ROUND * reads)

    def carried(self, role: str, tokens: int, length: int) -> Work:
        """Return a walk that carries its state."""
        tile, G = self.p.tile(role), self.group
        of_keys, tiled = role in ("dk", "dv"), self.V if role in ("forward", "dv") else self.D
        width = min(tile.width, tiled)
        D, V = (self.D, width) if role in ("forward", "dv") else (width, self.V)
        numbers = {
            "forward": 2 * D + 2 * V,
            "dq": 3 * D + 2 * V,
            "dk": 2 * D + V + G * (D + V),
            "dv": D + V + G * (D + V),
        }[role]
        queries, keys = {
            "forward": (self.D + self.V, self.D + self.V),
            "dq": (2 * self.D + self.V, self.D + self.V),
            "dk": (self.D + self.V, 2 * self.D + self.V),
            "dv": (self.D + self.V, self.D + self.V),
        }[role]
        if not self.p.causal:
            numbers = {"forward": D + V, "dq": 2 * D + V, "dk": 2 * D + V, "dv": D + V}[role]
            queries, keys = (0, numbers) if of_keys else (numbers, 0)
        heads, segments = self.HKV if of_keys else self.H, self.count(tokens, length)
        moved = self.crossing(tokens, queries, keys)
        states = segments * self.HKV * self.D * self.V * 4 if length < tokens else 0
        clocks = self.share * CLOCKS[role] * (numbers * min(length, tokens) + self.D * self.V)
        return Work(role, segments * heads * -(-tiled // width), clocks, tile.warps, moved, states)

    def stored(self, role: str, tokens: int, length: int) -> Work:
        """Return a walk that reads its states."""
        tile, D, V, G = self.p.tile(role), self.D, self.V, self.group
        of_keys, of_k, of_v = role.startswith("stored_dk") or role == "stored_dv", "k" in role[8:], "v" in role[8:]
        length = min(length, tokens)
        seen = (length + min(tile.tokens, length)) / 2
        pairs = D + V + tile.tokens
        if of_keys:
            own = (2 * D + V) * of_k + (D + V) * of_v
            both = 1.5 if of_k and of_v else 1.0
            numbers = tile.tokens * own + D * V + G * seen * pairs * both
            queries, keys = D + V, own
        else:
            own = D + V if role == "stored_forward" else 2 * D + V
            numbers = tile.tokens * own + D * V + seen * pairs
            queries, keys = own, D + V
        segments = self.count(tokens, length)
        programs = segments * -(-length // tile.tokens) * (self.HKV if of_keys else self.H)
        states = segments * self.HKV * D * V * self.size
        clocks = self.share * CLOCKS[role] * numbers
        return Work(role, programs, clocks, tile.warps, self.crossing(tokens, queries, keys), states)

    def sums(self, role: str, tokens: int, cut: Cut) -> list[Work]:
        """Return what comes before a walk over segments."""
        return [self.state(role, tokens, cut.length), self.scan(tokens, cut.length, stored=cut.stored)]

    def forward(self, cut: Cut) -> list[Work]:
        """Return the forward."""
        if cut.stored:
            return [*self.sums("state", self.T, cut), self.stored("stored_forward", self.T, cut.length)]
        before = self.sums("state", self.T, cut) if self.p.causal and cut.length < self.T else []
        return [*before, self.carried("forward", self.T, cut.length)]

    def dq(self, cut: Cut) -> list[Work]:
        """Return dq and what it starts from."""
        if cut.stored:
            return [*self.sums("state", self.T, cut), self.stored("stored_dq", self.T, cut.length)]
        before = self.sums("state", self.T, cut) if self.p.causal and cut.length < self.T else []
        return [*before, self.carried("dq", self.T, cut.length)]

    def dkv(self, cut: Cut) -> list[Work]:
        """Return dk and dv and what they start from."""
        if cut.stored:
            roles = ("stored_dkv",) if self.p.has("stored_dkv") else ("stored_dk", "stored_dv")
            walks = [self.stored(role, self.S, cut.length) for role in roles]
            return [*self.sums("reverse_state", self.S, cut), *walks]
        before = self.sums("reverse_state", self.S, cut) if self.p.causal and cut.length < self.S else []
        return [*before, *(self.carried(role, self.S, cut.length) for role in ("dk", "dv"))]

    def lone(self, role: str) -> Callable[[Cut], list[Work]]:
        """Return the sums over all tokens as a function of their cut."""
        tokens = self.S if role == "state" else self.T
        return lambda cut: self.sums(role, tokens, cut)


def cuts(p: Problem, tokens: int, role: str) -> Iterator[Cut]:
    """List the cuts that are considered for a walk, whole sequences first.

    Args:
        p: The problem.
        tokens: Tokens of a sequence, or of all packed ones.
        role: The walk that carries its state, or ``"state"`` or ``"reverse_state"``.
    """
    stored = p.causal and p.has("stored_" + role)
    if stored and p.log_decay is not None:
        # A walk that carries a state that fades does not fit into registers.
        yield from (Cut(True, length) for length in STORED_LENGTHS)
        return
    yield Cut(False, tokens)
    chunk = p.tile(role).tokens
    pieces = 2
    while tokens > pieces * chunk and pieces <= 4 * p.target.processors:
        yield Cut(False, -(-tokens // (pieces * chunk)) * chunk)
        pieces += max(1, pieces // 6)
    if stored:
        for length in STORED_LENGTHS:
            yield Cut(True, length)


def best(p: Problem, of: Callable[[Cut], list[Work]], candidates: Iterator[Cut]) -> Cut:
    """Return the cut that is predicted to take the least time; of equal ones, the first."""
    return min(candidates, key=lambda cut: microseconds(p.target, of(cut)))


def forward_cut(p: Problem) -> Cut:
    """Cut sequences for the forward."""
    return best(p, Costs(p).forward, cuts(p, int(p.q.shape[2]), "forward"))


def stored_cut(p: Problem) -> Cut:
    """Cut sequences for a forward that reads its states."""
    return best(p, Costs(p).forward, (cut for cut in cuts(p, int(p.q.shape[2]), "forward") if cut.stored))


def dq_cut(p: Problem) -> Cut:
    """Cut sequences for dq."""
    return best(p, Costs(p).dq, cuts(p, int(p.q.shape[2]), "dq"))


def dkv_cut(p: Problem) -> Cut:
    """Cut sequences for dk and dv, which start from the same states."""
    return best(p, Costs(p).dkv, cuts(p, int(p.k.shape[2]), "dk"))


def both_cut(p: Problem) -> Cut:
    """Cut sequences for dq, dk and dv alike."""
    costs = Costs(p)
    return best(p, lambda cut: [*costs.dq(cut), *costs.dkv(cut)], cuts(p, int(p.k.shape[2]), "dk"))


def lone_cut(p: Problem, role: str) -> Cut:
    """Cut sequences for sums over all tokens, without causality."""
    tokens = int((p.k if role == "state" else p.q).shape[2])
    return best(p, Costs(p).lone(role), cuts(p._replace(causal=False), tokens, role))
