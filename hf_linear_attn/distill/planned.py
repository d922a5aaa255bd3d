"""What a plan of a distillation says: memory, work and time by stage, and how sequences are split."""

from dataclasses import dataclass

from hf_linear_attn.evaluation.view import markdown_table

SLACK = 0.95
"""Share of a GPU's memory that is counted on: its allocator and its driver take some."""


@dataclass(frozen=True)
class StagePlan:
    """One stage: memory per GPU by part in GiB, work, and time."""

    stage: str
    memory_gib: dict[str, float]
    trained_parameters: int
    tokens: float
    exaflop: float
    hours: float

    @property
    def total_gib(self) -> float:
        """Memory per GPU."""
        return sum(self.memory_gib.values())


@dataclass(frozen=True)
class Split:
    """How sequences are split over ranks, and what each of those sends for one layer in a forward."""

    ranks: int
    length: int
    states_bytes: int
    keys_bytes: int
    layers: int


@dataclass(frozen=True)
class Plan:
    """What a run needs."""

    model: str
    parameters: int
    feature_map_parameters: int
    gpus: int
    sharded: bool
    stages: tuple[StagePlan, ...]
    split: Split | None = None
    longest: int | None = None

    def fits(self, gpu_memory: float) -> bool:
        """Tell whether GPUs of so many GiB hold it."""
        return self.total_gib <= SLACK * gpu_memory

    @property
    def total_gib(self) -> float:
        """Memory per GPU of the stage that needs most."""
        return max(stage.total_gib for stage in self.stages)

    def table(self) -> str:
        """Return the plan as a Markdown table."""
        stages, machine = self.stages, "one GPU"
        if self.gpus > 1:
            machine = f"{self.gpus} GPUs, " + ("sharded" if self.sharded else "each with all of it")
        rows = [[part, *(f"{s.memory_gib[part]:.1f}" for s in stages)] for part in stages[0].memory_gib]
        rows += [
            ["**total**", *(f"**{s.total_gib:.1f}**" for s in stages)],
            ["parameters trained", *(f"{s.trained_parameters / 1e6:,.1f}M" for s in stages)],
            ["tokens", *(f"{s.tokens / 1e6:,.1f}M" for s in stages)],
            ["work, EFLOP", *(f"{s.exaflop:.3g}" for s in stages)],
            ["hours", *(f"{s.hours:.2f}" for s in stages)],
        ]
        lines = [
            f"{self.model}: {self.parameters / 1e9:.2f}B parameters, feature maps and mixing weights "
            f"{self.feature_map_parameters / 1e6:.1f}M, {machine}",
            "",
            markdown_table(["per GPU, GiB", *(s.stage for s in stages)], rows),
        ]
        if (split := self.split) is not None:
            lines += [
                "",
                f"Sequences of {split.length:,} tokens are split over {split.ranks} GPUs. Each sends "
                f"{split.states_bytes / 2**20:.1f} MiB of states for a layer in a forward, at any length; "
                f"keys and values of this length would be {split.keys_bytes / 2**20:.1f} MiB.",
            ]
            if self.longest is not None:
                fits = f"a sequence of {self.longest:,} tokens, split over {split.ranks} GPUs"
                lines.append(f"Expected to fit: {fits}.")
        return "\n".join(lines)
