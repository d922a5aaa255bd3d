"""Everything to be asked of a GPU, one list in order of worth, with what each step is expected to give.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --output runs/gpu
    python benchmarks/gpu.py --output runs/gpu --within 570 --archive results.tar.gz

A step is a process of its own; what takes longer than its limit is ended with its children. What it prints goes to
`NAME.log` and what it measures to `NAME.json` in the output folder, `steps.json` there says what became of it, and
`summary.md` puts what was found beside what was expected. The same command goes on behind the last finished step;
`--again` repeats one, and a suite that was cut off goes on within it. The last steps take hours, and go on each time
they are asked. Where a machine is lent for minutes, `--within` starts nothing that may not end in time, and
`--archive` packs the folder into one file as results appear: unpacked on another machine, the list goes on there.
`--dry-run` tries every step at tiny size on a CPU, and judges no figure.
"""

import argparse
import json
import math
import operator
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Parser, by_turns, markdown, provenance
from problems import beside_kept, choice_problem, hybrid_problem, keeping, prefill_problem, window_problem
from suites.distill import WINDOW
from suites.host import RECOMMENDED
from suites.kernels import OURS, SHAPES, captured, copy_bandwidth, shape_of, times
from torch import Tensor

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.diagnostics import check
from hf_linear_attn.diagnostics.parts import ON_GPU, Sizes, parts
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.files import locked, write_atomic
from hf_linear_attn.layers import Call, LinearAttention
from hf_linear_attn.layers import Sizes as LayerSizes
from hf_linear_attn.ops.hybrid.triton.prefill import prefill_launches
from hf_linear_attn.ops.hybrid.triton.trade import hybrid_launches
from hf_linear_attn.ops.kept.triton import choose_launch
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.triton.plan import Problem, target_of
from hf_linear_attn.ops.triton.run import clear_caches
from hf_linear_attn.ops.window.triton.forward import window_launches
from hf_linear_attn.shell import shell

ROOT = Path(__file__).parents[1]
RECIPE = "recommended"
"""A variant of the models suite."""
STATE = "64 features, window 94"
"""A recipe of the distill suite."""
RACECHECK = "compute-sanitizer --tool racecheck --error-exitcode 1"
NEWEST_TRITON = ROOT / "build" / "triton-newest"
"""Where `pip install --no-deps --target build/triton-newest triton` puts it."""
LARGER = "{folder}/teacher-86m/teacher"
"""A teacher whose heads are as large as the small one's, with the text of all installed packages."""
EVERY = 15.0
"""Seconds between two archives while a step runs."""


class Limit(NamedTuple):
    """A figure that a step is expected to give; its value may be a text, which says why there is none."""

    what: str
    most: float
    value: Callable[[Any], float | str]


class Step(NamedTuple):
    """One thing to ask.

    Attributes:
        name: Its name, of its log and its result.
        words: What is run; ``{python}``, ``{folder}``, ``{result}``, ``{tiles}``, ``{packages}`` and ``{jobs}``
            are filled in.
        full: What follows on a GPU.
        tiny: What follows in a dry run; scripts that need a GPU say only whether they know the flags before it.
        limits: Figures in its result; where there are none, it is expected to end with status 0.
        obstacle: Why it cannot be asked here, if so.
        seconds: When it is ended.
        goes_on: Whether it may take longer, and goes on when it is asked again.
    """

    name: str
    words: str = ""
    full: str = ""
    tiny: str = ""
    limits: Sequence[Limit] = ()
    obstacle: str = ""
    seconds: float = 480
    goes_on: bool = False

    @property
    def expected(self) -> str:
        """Its expectation, for people."""
        return "; ".join(f"{limit.what} at most {limit.most:g}" for limit in self.limits) or "ends with status 0"


def row(result: Mapping[str, Any], shape: int, tokens: int) -> dict[str, Any]:
    """Return a row of the kernels suite."""
    return next(x for x in result["rows"] if shape_of(x) == SHAPES[shape] and x["tokens"] == tokens)


def beside(peer: str, tokens: int, most: float) -> Limit:
    """Limit our forward's time by a peer's, of the first shape."""

    def value(result: Any) -> float | str:
        found = row(result, 0, tokens)
        return found[OURS]["forward"] / found[peer]["forward"] if peer in found else "not installed, or did not run"

    return Limit(f"forward at {tokens} over {peer}'s", most, value)


def multi_head(result: Any) -> float:
    """Return the ns of a forward and a backward per head and token, with as many key heads as query heads."""
    mine = row(result, 1, 8192)[OURS]
    return float(1e6 * (mine["forward"] + mine["backward"]) / (8192 * SHAPES[1].H))


def host(result: Any) -> float:
    """Return the microseconds of a call that are not the device's."""
    mine = row(result, 0, 2048)[OURS]
    return float(1e3 * (mine["forward"] - mine["forward_on_device"]))


def models(
    part: str,
    flag: str,
    limits: Mapping[int, float],
    name: str | None = None,
    *more: str,
    of_softmax: bool = False,
) -> Step:
    """Return a step of the models suite: a part at some lengths, limited in ms or as a part of softmax's time.

    Args:
        part: The part.
        flag: What its lengths are called.
        limits: Limits by length.
        name: The step's; None for the part's, beside softmax and kept keys. Others are of the recommended recipe alone.
        *more: Further words.
        of_softmax: Whether the limits are parts of softmax's time.
    """

    def limit(tokens: int, most: float) -> Limit:
        def value(result: Any) -> float:
            found = {x["variant"]: x["median_ms"] for x in result["cells"].values() if x["tokens"] == tokens}
            return float(found[RECIPE] / (found["softmax"] if of_softmax else 1))

        return Limit(f"{tokens} tokens, {'over softmax' if of_softmax else 'ms'}", most, value)

    variants = RECIPE if name else f"softmax {RECIPE} 'kept keys'"
    words = f"{SUITE} models --parts {part} --variants {variants} {' '.join(more)} --{flag} "
    tiny = "32 --shapes tiny --device cpu --dtype float32 --repeats 1 --seconds 0 --decode-tokens 1 --decode-warm-up 1"
    full = f"{' '.join(map(str, limits))} --shapes llama-8b"
    # Prompts and training took an H100 45 s, what a compiler reads more.
    seconds = 300 if part in ("decode", "compiled", "compiled-training") else 120
    return Step(name or part, words, full, tiny, [limit(*x) for x in limits.items()], seconds=seconds)


def study(name: str, times: int, *more: str) -> Step:
    """Return a step that distils the small teacher with so many times the tokens of docs/results/distillation.md.

    It asks what a state learns of text with more of them: beside a window alone of as many bytes. Further words may
    name another teacher.
    """

    def ahead(what: str, *keys: str) -> Limit:
        def value(result: Any) -> float:
            found = (result["recipes"][name]["0"]["figures"] for name in (STATE, WINDOW))
            state, window = (reduce(operator.getitem, keys, figures) for figures in found)
            return float(state - window)

        return Limit(f"nats of {what}, with a state less a window alone", 0, value)

    words = f"{SUITE} distill --recipes '{STATE}' '{WINDOW}' --seeds 0 --answer-samples 0 {' '.join(more)}"
    words += f" --rows 64 --mixed-precision bf16 --work-dir {{folder}}/{name}"
    limits = [ahead("512 tokens' late half", "late_loss_nats"), ahead("2,048 tokens", "longer", "loss_nats")]
    full = f"--transfer-steps {10 * times} --distill-steps {90 * times}"
    tiny = "--rows 4 --mixed-precision no --transfer-steps 1 --distill-steps 1 --heldout-rows 4 --samples 1"
    return Step(name, words, full, tiny, limits, goes_on=True)


# pytest-benchmark, where it is installed, refuses several processes.
PYTEST = "{python} -m pytest -q -p no:cacheprovider -p no:benchmark"
SUITE = "{python} benchmarks/run.py --output {result} --suite"
MEASURE, TUNE = "{python} benchmarks/gpu.py --output {folder} --measure", "{python} benchmarks/tune.py --output {tiles}"
TESTS = 'tests/ops -n {jobs} -m "not slow and not optional and not sweep"'
ONE_TEST = "tests/ops/test_decode.py -k empty_and_fits"
OF_REPEATS = [Limit("parts whose bits differ", 0, lambda x: len(x["differ"]))]
OF_KERNELS = [
    Limit("prefill at 8192, ms", 0.45, lambda x: x["prefill"]["ms"]),
    Limit("step of 64 over its bytes", 1.3, lambda x: x["step of 64"]["over its bytes"]),
    Limit("layer at 4096, forward and backward, ms", 1.0, lambda x: x["training"]["ms"]),
]
BY = {"redundancy": False, "scores": True}
"""How keys are kept, and whether they have scores."""
OF_KERNELS += [
    Limit("choice of keys at 8192 by redundancy, ms", 6, lambda x: x["choice of keys by redundancy"]["ms"]),
    Limit("choice of keys at 8192 by scores, ms", 3, lambda x: x["choice of keys by scores"]["ms"]),
    Limit("window and kept keys at 8192, ms", 0.6, lambda x: x["window and kept keys"]["ms"]),
    *(
        Limit(
            f"step of 64 with keys kept by {name} over one without",
            1.3,
            lambda x, n=name: x[f"step of 64, keys kept by {n}"]["ms"] / x["step of 64"]["ms"],
        )
        for name in BY
    ),
]
OF_PEERS = [
    beside("softmax, cuDNN", 32768, 0.08),
    beside("softmax, flash", 32768, 0.05),
    beside("fla chunk, compiled map", 8192, 1.0),
    Limit("over Helion", 1.0, lambda x: "no row of the suite" if find_spec("helion") else "not installed"),
    Limit("32 key heads at 8192, forward and backward, ns per head and token", 3.0, multi_head),
    Limit("call less its device time at 2048, us", 60, host),
]
NO_NEWEST = "" if NEWEST_TRITON.is_dir() else "no build/triton-newest"
NO_CHECK = "" if shutil.which("compute-sanitizer") else "no compute-sanitizer"
STEPS = [
    Step("repeats", f"{MEASURE} repeats", "", "--dry-run", OF_REPEATS, seconds=300),
    Step("check", "{python} -m hf_linear_attn.cli check", "--full", "--backend torch"),
    Step("tests", PYTEST, TESTS, ONE_TEST),
    Step("tests-newest-triton", PYTEST, TESTS, ONE_TEST, (), NO_NEWEST),
    Step("tests-marked-gpu", PYTEST, "-m gpu tests", ONE_TEST),
    Step("kernels", f"{MEASURE} kernels", "", "--dry-run", OF_KERNELS, seconds=120),
    Step("tune-step", TUNE, "--roles hybrid", "--roles hybrid --help"),
    Step("tune-prefill", TUNE, "--roles prefill", "--roles prefill --help"),
    models("prefill", "lengths", {8192: 225, 32768: 1016}),
    models("compiled", "lengths", {8192: 225}, "prefill-compiled"),
    models("decode", "decode-lengths", {32768: 8}),
    # What a step takes does not depend on what came before, and 64 long texts take long to read.
    models("decode", "decode-lengths", {1024: 9}, "decode-64", "--decode-batch 64"),
    models("training", "training-lengths", {4096: 1}, of_softmax=True),
    models("compiled-training", "training-lengths", {4096: 1}, of_softmax=True),
    models("training", "training-lengths", {4096: 480}, "training-recipe", "--adapters"),
    Step("peers", f"{SUITE} kernels --lengths 2048 8192 32768", "", "--help", OF_PEERS),
    Step(
        "racecheck",
        "",
        f"{RACECHECK} {PYTEST} tests/ops/test_decode.py -k triton",
        f"{PYTEST} {ONE_TEST}",
        (),
        NO_CHECK,
    ),
    study("study-10", 10),
    study("study-100", 100),
    Step(
        "teacher-86m",
        "{python} examples/train_teacher.py --run-dir {folder}/teacher-86m --output-dir " + LARGER,
        "--device cuda --bf16 --width 768 --layers 12 --heads 12 --kv-heads 6 --vocab-size 8192 --tokens-scale 8 "
        "--workers 8 --text {packages}",
        "--steps-scale 0.001 --max-documents 20 --samples 2 --lengths 256",
        goes_on=True,
    ),
    study("study-86m", 10, "--teacher", LARGER),
]


def repeats(*, dry_run: bool) -> dict[str, Any]:
    """Compare repeated calls with first ones, bit for bit: of other tensors, on two streams and from two threads."""
    device, wait = torch.device("cpu" if dry_run else "cuda"), (lambda: None) if dry_run else torch.cuda.synchronize
    sizes, dtypes = (Sizes(24, 40, 16, 24), [torch.float32]) if dry_run else (ON_GPU, list(check.TOLERANCE))
    # Triton's interpreter takes one launch at a time.
    streams = [None] if dry_run else [torch.cuda.Stream(), torch.cuda.Stream()]
    count, differ = 0, []
    for dtype in dtypes:
        for part in parts(device, dtype, sizes, full=not dry_run):

            def call(inputs: Mapping[str, Tensor], stream: Any = None, part: Any = part) -> dict[str, Tensor]:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    return check._results(part, inputs, "triton")

            given, first = [part.inputs, {name: 0.75 * x for name, x in part.inputs.items()}], []
            for inputs in given:
                clear_caches()
                first.append(call(inputs))
            wait()
            turns = [i % 2 for i in range(2 if dry_run else 8)]
            found = {
                "again": [call(given[i]) for i in turns],
                "streams": [call(given[i], streams[i % len(streams)]) for i in turns],
            }
            # Whoever comes first plans for both.
            clear_caches()
            with ThreadPoolExecutor(len(streams)) as pool:
                tasks = [pool.submit(call, given[i], streams[i % len(streams)]) for i in turns]
                found["threads"] = [task.result() for task in tasks]
            wait()
            for way, results in found.items():
                same = [torch.equal(x[n], first[i][n]) for i, x in zip(turns, results, strict=True) for n in first[i]]
                differ += [] if all(same) else [f"{part.name}, {dtype}, {way}"]
            count += 1
            print(f"{count} parts, differing: {differ}", flush=True)
    return {"parts": count, "differ": differ}


def kernels(*, dry_run: bool) -> dict[str, Any]:
    """Time the kernels of a prompt and of a step, and a layer's training, each without what is around it."""
    device = torch.device("cpu") if dry_run else torch.device("cuda", torch.cuda.current_device())
    (H, HKV, D), prompt, text = ((4, 2, 16), 64, 64) if dry_run else ((32, 8, 128), 8192, 4096)
    target, bandwidth = target_of(device), 1e9 if dry_run else copy_bandwidth()
    found: dict[str, Any] = {}

    def draw(tokens: int, batch: int = 1) -> Iterator[Tensor]:
        sizes = ((batch, tokens, heads, D) for heads in (H, HKV, HKV))
        return (torch.randn(size, device=device, dtype=torch.bfloat16).transpose(1, 2) for size in sizes)

    def problem(tokens: int, batch: int = 1) -> Problem:
        return Problem(target, *draw(tokens, batch), None, None, None, None, "elu", True, 0)

    def note(name: str, call: Callable[[], object], nbytes: int = 0, *, graph: bool = True) -> None:
        if dry_run:
            ms = by_turns({"": call}, 1)[""]["median_ms"]
        else:
            ms = times([captured(call) if graph else call], 30)["median_ms"]
        found[name] = {"ms": ms} | ({"over its bytes": ms / (1e3 * nbytes / bandwidth)} if nbytes else {})
        print(f"{name}: {found[name]}", flush=True)

    launches = prefill_launches(target, prefill_problem(problem(prompt)))[1]
    note("prefill", lambda: [launch.run() for launch in launches])
    for batch in (1, 64) if not dry_run else (1, 2):
        step = hybrid_problem(problem(1, batch))
        # Behind a long text, whose window is full.
        for x, value in ((step.seen, text), (step.key_mask, True), (step.near_mask, True)):
            x.fill_(value)
        nbytes = sum(x.nbytes for x in (*step, step.kv, step.z, step.far_keys) if isinstance(x, Tensor))
        launches = hybrid_launches(target, step)[1]
        note(f"step of {batch}", lambda launches=launches: [x.run() for x in launches], nbytes)
        for name, scores in BY.items():
            launches = hybrid_launches(target, keeping(step, scores=scores))[1]
            note(f"step of {batch}, keys kept by {name}", lambda launches=launches: [x.run() for x in launches])
    launches = window_launches(beside_kept(window_problem(problem(prompt))))[1]
    note("window and kept keys", lambda: [launch.run() for launch in launches])
    for name, scores in BY.items():
        choice = choice_problem(problem(prompt), scores=scores)
        note(f"choice of keys by {name}", choose_launch(target, choice)[1].run)
    layer = LinearAttention(
        LinearAttentionConfig(**RECOMMENDED, backend="triton"), LayerSizes(D, H, HKV, D**-0.5, D), "layer", rotated=True
    ).to(device)
    qkv, turns = [x.requires_grad_() for x in draw(text)], torch.randn(1, text, D, device=device, dtype=torch.bfloat16)
    wanted = [*qkv, *(x for x in layer.parameters() if x.requires_grad)]

    def train() -> None:
        o = layer(*qkv, Call(state=None, rotation=Rotation(turns, Layout("half", "pair"))))
        torch.autograd.grad(o.sum(), wanted, allow_unused=True)

    note("training", train, graph=False)
    return found


def run(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float, told: Any) -> int | None:
    """Run a process until it ends or its time is over, and end its children; return its status, or None.

    Args:
        command: Its words.
        environment: Its variables.
        log: Gets what it prints.
        seconds: Its limit.
        told: Gets its number at the beginning, and is called from time to time.
    """
    end = time.monotonic() + seconds
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            **{"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL, "stdout": file, "stderr": file},
            process_group=0,
        )
    try:
        told(process.pid)
        while (left := end - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, EVERY))
            told(process.pid)
        return None
    finally:
        end_group(process.pid)
        process.wait()


def end_group(number: int) -> None:
    """End a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


class Book:
    """What became of the steps, kept in a folder.

    Args:
        folder: The folder.
        archive: A file that gets all of it, whenever something is new.
        dry_run: Whether these are tiny steps on a CPU.
    """

    def __init__(self, folder: Path, archive: Path | None, *, dry_run: bool) -> None:
        self.folder, self.archive, self.dry_run = folder, archive, dry_run
        path = folder / "steps.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        if known.get("dry_run", dry_run) != dry_run:
            remedy = "Choose another: what is tried at tiny size is no result."
            raise ArgumentError("output", "not mix dry runs with others", str(folder), remedy)
        self.steps: dict[str, Any] = known.get("steps", {})
        self.running = known.get("running")

    def end_left_over(self) -> None:
        """End the step that a killed run has left, if it still runs: it would disturb all others."""
        if self.running:
            with suppress(OSError):
                words = Path(f"/proc/{self.running['process']}/cmdline").read_text().split("\0")[:-1]
                if words == self.running["command"]:
                    end_group(self.running["process"])
        self.running = None

    def save(self) -> None:
        """Write the state, the summary and the archive."""
        state = {"dry_run": self.dry_run, "running": self.running, "steps": self.steps}
        write_atomic(self.folder / "steps.json", json.dumps(state, indent=1) + "\n")
        write_atomic(self.folder / "summary.md", self.summary())
        if self.archive:
            temporary = self.archive.with_name(f".{self.archive.name}.tmp")
            # A result's own temporary file may go while the folder is read.
            with suppress(FileNotFoundError):
                with tarfile.open(temporary, "w:gz") as file:
                    file.add(self.folder, self.folder.name)
                temporary.replace(self.archive)

    def summary(self) -> str:
        """Return what was expected and found, as a table."""
        rows = [{"step": name} | self.steps[name] for name in (s.name for s in STEPS) if name in self.steps]
        return markdown([{name: str(x).replace("|", "/") for name, x in row.items()} for row in rows])

    def judge(self, step: Step, status: int | None) -> tuple[str, bool]:
        """Return what a step has found, and whether that is as expected; tiny sizes are held to no limits."""
        result, told = self.folder / f"{step.name}.json", []
        held = status == 0 and (self.dry_run or not step.limits or result.exists())
        for limit in step.limits if result.exists() else ():
            try:
                value = limit.value(json.loads(result.read_text()))
            except (KeyError, StopIteration):
                value = math.nan
            held = held and (self.dry_run or isinstance(value, str) or value <= limit.most)
            shown = value if isinstance(value, str) else f"{value:.3g}" if value == value else "not measured"
            told.append(f"{limit.what}: {shown}")
        lines = (self.folder / f"{step.name}.log").read_text(errors="replace").strip().splitlines()
        told = told or [line.strip() for line in lines[-1:]]
        if status != 0:
            told.append(f"ended after {step.seconds:g} s" if status is None else f"status {status}")
        return "; ".join(told)[:500], held

    def ask(self, step: Step) -> None:
        """Run a step and keep what it gives."""
        paths = {
            "folder": self.folder,
            "result": self.folder / f"{step.name}.json",
            "tiles": self.folder / "tiles.json",
            "packages": Path(sysconfig.get_path("purelib")),
        }
        filled = {name: shlex.quote(str(path.resolve())) for name, path in paths.items()}
        filled |= {"python": shlex.quote(sys.executable), "jobs": str(min(12, os.cpu_count() or 1))}
        command = shlex.split(f"{step.words} {step.tiny if self.dry_run else step.full}".format_map(filled))
        # Products of cuBLAS are alike on two streams only with its setting; steps find the package as it is here.
        searched = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": searched}
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if self.dry_run else {}
        if step.name == "tests-newest-triton":
            environment["PYTHONPATH"] = f"{NEWEST_TRITON}{os.pathsep}{searched}"

        def told(process: int) -> None:
            self.running = {"process": process, "command": command}
            self.save()

        print(f"{step.name}: {shlex.join(command)}", flush=True)
        started, facts = time.monotonic(), provenance("gpu", ())
        log = self.folder / f"{step.name}.log"
        status = run(command, os.environ | environment, log, step.seconds, told)
        found, held = self.judge(step, status)
        verdict = "yes" if held else "not yet" if status is None and step.goes_on else "no"
        entry = {"expected": step.expected, "found": found, "held": verdict}
        entry |= {"seconds": round(time.monotonic() - started), "commit": str(facts["commit"])[:10]}
        self.steps[step.name] = entry | {"on": facts.get("gpu", "CPU"), "cut off": status is None}
        self.running = None
        self.save()
        said = {"yes": "held", "no": "NOT HELD", "not yet": "the same command goes on with it"}[verdict]
        print(f"{step.name}: {found}: {said}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask what has not been asked yet."""
    names = [step.name for step in STEPS]
    parser = Parser(prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, help="folder of results (runs/gpu, of a dry run runs/gpu-dry)")
    add("--only", nargs="+", choices=names, metavar="NAME", default=names, help="these steps")
    add("--again", nargs="+", choices=names, metavar="NAME", default=[], help="repeat these, and then go on")
    add("--within", type=float, metavar="SECONDS", default=float("inf"), help="start nothing that may end later")
    add("--archive", type=Path, metavar="FILE", help="tar.gz of the folder, kept up to date")
    add("--list", action="store_true", help="print the steps")
    add("--dry-run", action="store_true", help="try every step at tiny size on a CPU")
    add("--measure", choices=("repeats", "kernels"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.list:
        rows = [{"step": s.name, "expected": s.expected, "seconds": s.seconds, "not there": s.obstacle} for s in STEPS]
        print(markdown(rows), end="")
        return 0
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("this needs a CUDA or ROCm GPU, and torch sees none; --dry-run tries every step on a CPU")
    folder = arguments.output or ROOT / "runs" / ("gpu-dry" if arguments.dry_run else "gpu")
    if arguments.measure:
        folder.mkdir(parents=True, exist_ok=True)
        result = {"repeats": repeats, "kernels": kernels}[arguments.measure](dry_run=arguments.dry_run)
        write_atomic(folder / f"{arguments.measure}.json", json.dumps(result, indent=1) + "\n")
        return 0
    end = time.monotonic() + arguments.within
    # Whoever ends this ends its step.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with shell("gpu.py"), locked(folder, "output"):
        book = Book(folder, arguments.archive, dry_run=arguments.dry_run)
        book.end_left_over()
        for name in arguments.again:
            before = book.steps.pop(name, {})
            if not before.get("cut off"):
                (folder / f"{name}.json").unlink(missing_ok=True)
        book.save()
        for step in STEPS:
            if step.name not in arguments.only or book.steps.get(step.name, {}).get("held") in ("yes", "no"):
                continue
            if step.obstacle:
                book.steps[step.name] = {"expected": step.expected, "found": step.obstacle, "held": "not there"}
                book.save()
            elif time.monotonic() + step.seconds > end:
                print(f"{step.name} may take {step.seconds:g} s: the same command goes on there")
                break
            else:
                book.ask(step)
        print(f"\n{book.summary()}", end="")
    return int(any(row["held"] == "no" for row in book.steps.values()))


if __name__ == "__main__":
    sys.exit(main())
