import argparse
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_linear_attn.distill.measure import shown
from hf_linear_attn.loading import load_model

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """Import a file of the benchmarks folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{Path(name).name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs a suite in this process, which has imported already what a new one would take seconds for."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setattr(sys, "argv", [str(FOLDER / "run.py")])
        try:
            code = load("run").main(arguments)
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        if isinstance(code, str):
            # Python prints it, and ends with 1.
            code, err = 1, err + code
        return subprocess.CompletedProcess(arguments, code, out, err)

    return run


def test_each_file_in_the_folder_is_a_suite() -> None:
    suites = load("run").available()
    assert {"cpu", "kernels"} <= set(suites) == {path.stem for path in (FOLDER / "suites").glob("*.py")}
    assert all(summary.endswith(".") for summary in suites.values())


@pytest.mark.slow
def test_attention_is_timed_without_its_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks whenever it is read: each module attends once, and nothing else counts."""
    monkeypatch.syspath_prepend(FOLDER)
    layer, ticks = load("suites/layer"), itertools.count()
    monkeypatch.setattr(layer, "time", types.SimpleNamespace(process_time=lambda: float(next(ticks))))
    before = dict(ALL_ATTENTION_FUNCTIONS)
    (row,) = layer.time_modules([32], False, 1, ("softmax", "elu", "recommended"), alone=True)
    assert {row[f"{kind}, us"] for kind in ("softmax", "elu", "recommended")} == {1e6 / 32}
    assert "projections, us" not in row
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load("run").main(["--suite", "speed"])
    assert "invalid choice: 'speed'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        load("run").main(["--longest", "3"])
    assert "unrecognized arguments: --longest 3" in capsys.readouterr().err


def test_suites_take_flags_as_the_commands_do(capsys: pytest.CaptureFixture[str]) -> None:
    parser = load("harness").Parser(prog="suite")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--recipes", nargs="+", choices=["a", "b", "c, in full"])
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--finished-only", action="store_true")
    for words in ("--seeds 1,2 --work_dir x,y_z --finished_only", "--seeds=1,2 --work-dir=x,y_z --finished-only",
                  "--finished-only --seeds 1 2 --work-dir x,y_z"):  # fmt: skip
        found = parser.parse_args(words.split())
        assert (found.seeds, found.work_dir, found.finished_only) == ([1, 2], Path("x,y_z"), True)
    assert parser.parse_args(["--recipes", "a,b", "c, in full"]).recipes == ["a", "b", "c, in full"]
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--seeds", "x"])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_kernels_suite_asks_for_a_gpu(run: Run) -> None:
    found = run("--suite", "kernels")
    assert found.returncode == 1
    assert found.stderr.strip().endswith(
        "`--suite kernels` needs a CUDA or ROCm GPU, and torch sees none. Use `--suite cpu` here."
    )


def test_cpu_suite_writes_what_it_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["--suite", "cpu", "--output", str(tmp_path / "at.json"), "--threads", "1", "--repeats", "1"]
    # In a process of its own, as users run it.
    words = [sys.executable, FOLDER / "run.py", *words, "--longest", "256"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    result = json.loads((tmp_path / "at.json").read_text())
    assert [row["tokens"] for row in result["lengths"]] == [128, 256]
    row = result["lengths"][0]["forward"]
    assert row["ratio"] == row["softmax (SDPA)"]["median_ms"] / row["linear attention"]["median_ms"]
    facts = result["provenance"]
    assert facts["command"].startswith("python benchmarks/run.py --suite cpu --output")
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == 1
    page = (tmp_path / "at.md").read_text()
    assert f"| 128 | {row['linear attention']['median_ms']:.3g} |" in page
    assert "![Time by length](at.png)" in page
    assert (tmp_path / "at.png").stat().st_size > 1000


@pytest.mark.slow
def test_distill_suite_trains_and_writes_a_page(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output, page = tmp_path / "study.json", tmp_path / "study.md"
    arguments = ["--suite", "distill", "--output", str(output), "--report", str(page), "--work-dir", str(tmp_path)]
    arguments += ["--recipes", "window alone", "recommended", "--seeds", "0", "--transfer-steps", "1"]
    arguments += ["--distill-steps", "1", "--block-tokens", "192", "--heldout-rows", "4", "--samples", "2"]
    arguments += ["--answer-samples", "1"]
    found = run(*arguments, "--recall-factors", "1", "2")
    assert found.returncode == 0, found.stderr
    result = json.loads(output.read_text())
    assert result["recipes"]["recommended"]["0"]["tokens"] == 2 * 4 * 192
    assert list(result["recipes"]["window alone"]["0"]["figures"]["recall_at"]) == ["1", "2"]
    text = page.read_text()
    assert f"| {result['recipes']['recommended']['0']['figures']['loss_nats']:.3f} |" in text
    assert "| recall of 4 pairs | 1x | 2x | tokens/s |" in text
    rows = result["recipes"]["recommended"]["0"]["answers"]
    assert [row["length"] for row in rows if row["task"] == "copying"] == [192, 384, 768, 1536]
    for part in (text, found.stdout):
        assert "| passkey (a trained form) | 1x | 2x | 4x | 8x |" in part
        assert "| capital in text (held out of training) | 1x | 2x | 4x | 8x |" in part
        assert "| recommended | " + " | ".join(map(shown, rows[:4])) + " |" in part
    assert "![Nats of text and recall by recipe](study.svg)" in text
    assert page.with_suffix(".svg").stat().st_size > 1000
    # What is finished is not repeated.
    before = result["recipes"]
    assert run(*arguments, "--recall-factors", "1", "2", "--finished-only").returncode == 0
    assert json.loads(output.read_text())["recipes"] == before


def test_distill_suite_refuses_blocks_that_a_window_holds_whole(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "study.json"
    found = run("--suite", "distill", "--output", str(output), "--work-dir", str(tmp_path), "--block-tokens", "128")
    assert found.returncode == 2
    assert "--block-tokens must be more than 134, the window of equal cache bytes" in found.stderr
    assert not output.exists()


def test_distill_suite_says_that_nothing_is_finished(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "study.json"
    found = run("--suite", "distill", "--output", str(output), "--work-dir", str(tmp_path), "--finished-only")
    assert found.returncode == 2
    assert "holds no finished run of these recipes and seeds" in found.stderr
    assert not output.exists()


def test_state_and_window_of_the_study_share_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = load("suites/distill")
    arguments = study.parser().parse_args(["--output", "unused.json"])
    teacher = load_model("examples/teacher", "--teacher", attention="softmax", dtype=torch.float32)
    windows = {
        name: study.equal_cache_window(study.patched(teacher, study.settings_of(arguments, name, 0, 1)))
        for name in ("recommended", *study.SPLITS)
    }
    assert windows == {
        "recommended": 134,
        "64 features, window 94": 134,
        "64 features, window 94, decay": 134,
        "32 features, window 109": 133,
    }


def test_kernels_page_says_what_was_measured_and_what_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(FOLDER)
    kernels = load("suites/kernels")
    facts = load("harness").provenance("kernels", []) | {"flash-linear-attention": None}

    def timed(forward: float) -> dict[str, object]:
        medians = {"forward": forward, "backward": 2 * forward}
        quartiles = {f"{which}_iqr": [0.9 * time, 1.1 * time] for which, time in medians.items()}
        shares = {f"{which}_share_of_floor": 0.5 for which in ("forward", "backward")}
        return medians | quartiles | shares | {"saved_mib": 1.0, "peak_mib": 2.0}

    shape = {"B": 1, "H": 32, "HKV": 8, "D": 128}
    rows = [
        {**shape, "tokens": tokens, "left_out": {}, kernels.OURS: timed(tokens / 512), "commit": "0123456789ab"}
        | {"softmax, flash": timed((tokens / 512) ** 2 / 4)}
        for tokens in (4096, 512)
    ]
    rows[0]["left_out"] = {"softmax, cuDNN": "no kernel"}
    parts = [{"part": kernels.FEATURES, **rows[1], kernels.PYTORCH: timed(7.0)}]
    result = {"provenance": facts, "checked": [], "copy_bytes_per_second": 4e12, "rows": rows, "recipe": parts}
    result["decode"] = []
    kernels.save(tmp_path / "h.json", result | {"left_out": []})
    page = (tmp_path / "h.md").read_text()
    # Quadratic time crosses linear time where a quarter of the square of n is n.
    assert json.loads((tmp_path / "h.json").read_text())["break_even"]["forward"] == pytest.approx(2048)
    assert "| 512 | 1 | 0.9 - 1.1 | 0.5 | 0.25 | 2 | 1.8 - 2.2 | 0.5 | 0.25 | 1 | 2 |" in page
    assert "* B=1 H=32 HKV=8 D=128 4096, softmax, cuDNN: no kernel" in page
    assert "| 512 | 1 | 0.9 - 1.1 | 0.5 | 7 | 2 | 1.8 - 2.2 | 0.5 | 7 | 1 | 2 |" in page
    assert "![Time by length](h.png)" in page
    assert (tmp_path / "h.png").stat().st_size > 1000
    again = load("harness").earlier(tmp_path / "h.json", facts)
    assert again["rows"] == rows
    assert load("harness").earlier(tmp_path / "h.json", facts | {"torch": "9"}) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_traffic_is_less_with_kernels(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "traffic.json"
    small = ["--tokens", "80", "--heads", "2", "1", "--head-dim", "16"]
    found = run("--suite", "traffic", "--output", str(output), *small)
    assert found.returncode == 0, found.stderr
    rows = {row.pop("layer").split(" (")[0]: row for row in json.loads(output.read_text())["rows"]}
    # q, k, v, o and a normaliser per query, and of PyTorch's one operation the state, too.
    plain, state = rows["elu"], 4 * (16 * 16 + 16) / (2 * 80 * 16 * 2)
    assert plain["prefill, U: PyTorch"] == pytest.approx(3 + 2 / 16 + state, abs=0.15)
    assert plain["prefill, U: kernels"] == pytest.approx(3 + 2 / 16, abs=0.15)
    recommended = rows["norm_preserving, window 64"]
    for what in ("prefill, U", "forward and backward, U", "operations of a step"):
        assert recommended[f"{what}: kernels"] < 0.5 * recommended[f"{what}: PyTorch"]
    # What an op moves within is counted, too: the part of the window, and that of linear attention.
    trained = "forward and backward, U: kernels"
    assert recommended[trained] > rows["window 64 alone"][trained] + plain[trained]
    for name, row in rows.items():
        if "delta" in name or "decay" in name:
            continue
        # The kernel, and one more token that was seen; without a window learned features have kernels of their own.
        assert row["operations of a step: kernels"] == (4 if name == "hedgehog" else 2)
    assert recommended["operations of a step: PyTorch"] <= 45
    undone = rows["norm_preserving, window 64, rotation undone"]
    # Queries and keys each read the angles, which are as large as one of two heads.
    assert undone["prefill, U: kernels"] == pytest.approx(recommended["prefill, U: kernels"] + 2 / 2, abs=0.01)
    assert undone["operations of a step: PyTorch"] <= 60
    assert "| norm_preserving, window 64, rotation undone (recommended) |" in output.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks by the old name
def test_models_suite_goes_on_from_what_it_measured(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "models.json"
    small = ["--suite", "models", "--shapes", "tiny", "--device", "cpu", "--dtype", "float32", "--output", str(output)]
    small += [
        "--lengths",
        "32",
        "64",
        "--decode-lengths",
        "32",
        "64",
        "--training-lengths",
        "32",
        "--batch-length",
        "32",
    ]
    small += ["--most-batch", "4", "--decode-tokens", "2", "--decode-warm-up", "1", "--repeats", "2", "--chunk", "48"]
    found = run(*small, "--variants", "softmax", "elu", "--longest-softmax", "32")
    assert found.returncode == 0, found.stderr
    first = json.loads(output.read_text())["cells"]
    assert {key for key in first if "softmax" in key} == {
        f"tiny/softmax/{part}/32"
        for part in ("prefill", "compiled", "decode", "batch", "training", "compiled-training")
    }
    # Two layers with 2 key-value heads of 8: keys and values of 32 tokens, or a state and a key sum in fp32.
    assert first["tiny/softmax/prefill/32"]["cache_bytes"] == 2 * 2 * 2 * 32 * 8 * 4
    states = [first[f"tiny/elu/prefill/{tokens}"]["cache_bytes"] for tokens in (32, 64)]
    assert states[0] == states[1] < 2 * 2 * (8 + 2) * 8 * 4
    # Softmax comes last, on a model that was patched and is not any more.
    found = run(*small, "--variants", "elu", "hedgehog, window 64", "softmax", "--longest-softmax", "64")
    assert found.returncode == 0, found.stderr
    second = json.loads(output.read_text())["cells"]
    assert first.items() <= second.items()
    assert len(second) == len(first) + 9 + 3
    assert second["tiny/softmax/prefill/64"]["cache_bytes"] == 2 * 2 * 2 * 64 * 8 * 4
    # Twice the sequences have twice the states, and adapters go when they are measured.
    more = [
        "--decode-batch",
        "2",
        "--adapters",
        "--parts",
        "decode",
        "training",
        "--output",
        str(tmp_path / "more.json"),
    ]
    found = run(*small, *more, "--variants", "recommended", "softmax")
    assert found.returncode == 0, found.stderr
    third = json.loads((tmp_path / "more.json").read_text())["cells"]
    # Each layer counts its tokens once.
    sizes = [cells["tiny/softmax/decode/32"]["cache_bytes"] - 2 * 8 for cells in (first, third)]
    assert sizes[1] == 2 * sizes[0]
    assert third["tiny/recommended/training/32"]["status"] == "ok"
    row = first["tiny/softmax/prefill/32"]["median_ms"] / first["tiny/elu/prefill/32"]["median_ms"]
    assert f"| {row:.3g} |" in output.with_suffix(".md").read_text()


@pytest.mark.slow
def test_models_suite_compiles_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    models = load("suites/models")
    bench = models.Bench(
        models.build("tiny", torch.device("cpu"), torch.float32), argparse.Namespace(seconds=0, repeats=1)
    )
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    found = bench.compiled(16)
    assert graphs["unique_graphs"] == before + 1
    # Its memory is not measured.
    assert found.keys() == bench.prefill(16).keys() - {"peak_mib", "peak_method"}
    assert found["cache_bytes"] == 2 * 2 * 2 * 16 * 8 * 4


def test_models_suite_finds_the_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    models = load("suites/models")

    def forward(model: object, ids: torch.Tensor, cache: object, **_: object) -> None:
        if len(ids) > 23:
            raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(models, "forward", forward)
    model = models.build("tiny", torch.device("cpu"), torch.float32)
    bench = models.Bench(model, argparse.Namespace(most_batch=4096))
    assert bench.batch(16) == {"sequences": 22, "limited_by_memory": True}
    bench.arguments.most_batch = 16
    assert bench.batch(16) == {"sequences": 16, "limited_by_memory": False}


def test_a_write_that_fails_leaves_the_old_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, path = load("harness"), tmp_path / "result.json"
    harness.replace_text(path, "old")
    harness.replace_text(path, "new")
    assert path.read_text() == "new"

    def full(path: Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[:1])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        harness.replace_text(path, "newer")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_break_even() -> None:
    break_even = load("harness").break_even
    # Linear time against quadratic time: equal at 100.
    lengths = [16, 64, 256, 1024]
    linear, quadratic = [float(100 * n) for n in lengths], [float(n * n) for n in lengths]
    assert break_even(lengths, linear, quadratic) == pytest.approx(100)
    assert break_even(lengths, quadratic, linear) is None
    assert break_even(lengths, [1.0] * 4, [2.0] * 4) == 16
    # Slower again in between: only the last crossing counts.
    assert break_even(lengths, [1.0, 2.0, 1.0, 1.0], [2.0, 1.0, 2.0, 2.0]) == pytest.approx(128)
    assert math.isfinite(break_even(lengths, [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0]))


def test_compile_check_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = load("compile_check")
    good = check.Result("sm_90/bf16/D64/V64/g1/elu", "forward", (64, 64, 4, 2), 230, 0, 0, 49152, 16, 1200, 0, 18.8)
    budget = {"stack": 0, "shared": 49152, "loop": 1200}
    assert check.complaints(good, budget) == []
    for change, complaint in (
        ({"stack": 8}, "stack 8, budget 0"),
        ({"shared": 49153}, "shared 49153, budget 49152"),
        ({"loop": 1261}, "loop 1261 instructions, budget 1200 + 5 %"),
        ({"matrix": 0}, "none of sm_90's matrix instructions"),
        ({"transposed": True}, "a transposed product in shared memory, which Triton before 3.7.1 stores wrongly"),
        ({"unwritten": 2}, "2 instructions read uniform registers of something else, as of ptxas 12.8"),
    ):
        assert check.complaints(replace(good, **change), budget) == [complaint]
        # Of another Triton, only what its processor has counts.
        limits = check.complaints(replace(good, **change), budget, limits_only=True)
        assert limits == ([complaint] if {"matrix", "transposed", "unwritten"} & set(change) else [])
    assert check.complaints(replace(good, loop=1260), budget) == []
    assert check.complaints(good, None) == ["no budget (run with --update)"]
    too_large = replace(good, shared=300 << 10, stack=8192)
    for limits_only in (False, True):
        found = check.complaints(too_large, budget, limits_only=limits_only)
        assert f"{300 << 10} B of shared memory, and sm_90 has {227 << 10}" in found
        assert "stack 8192, and none may have 1024" in found
    # What has no matrix product has nothing to complain of.
    assert check.complaints(replace(good, role="decode", matrix=0), budget) == []


# Two loops: 4 instructions before, 3 in the outer one and 2 in the inner, one after, and a program's last jump.
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/                   STL [R1], R3 ;
        /*0030*/                   MOV R2, R1 ;
.L_x_1:
        /*0040*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_0:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/               @P0 BRA `(.L_x_0) ;
        /*0070*/                   LDL R3, [R1] ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
"""


def test_compile_check_counts_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = load("compile_check")
    nvidia = (r"\s*(\.L_x_\d+):", r"BRA.*`\((\.L_x_\d+)\)", r"/\*[0-9a-f]{4,5}\*/\s+\S")
    # Real loops are longer than this one's.
    listing = replace(check._listing(LISTING, *nvidia), loops=[(5, 11), (7, 9)])
    assert check._listing(LISTING, *nvidia).loops == [(5, 11)]
    assert listing.count() == 11
    assert listing.largest() == (5, 11)
    assert listing.executed(()) == 11
    # 6 outside of the loops, 3 in the outer one, 2 in the inner.
    assert listing.executed((10,)) == 6 + 10 * 5
    assert listing.executed((10, 4)) == 6 + 10 * (3 + 4 * 2)
    assert listing.executed((), 7, 9) == 2
    # A promise of warp groups is not kept by other matrix instructions.
    figures = check._figures(listing, check.PROCESSORS["sm_90"].matrix, r"\b(STL|LDL)")
    assert figures == {"matrix": 1, "loop": 5, "loop_spills": 1}
    assert check._figures(listing, check.PROCESSORS["sm_100"].matrix, "STL")["matrix"] == 0


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "programs"),
    [
        # 255 registers take 256 of each lane: 8 warps of them are a processor's.
        ("sm_90", 255, 1024, 4, 2),
        ("sm_90", 255, 1024, 8, 1),
        ("sm_90", 168, 48 << 10, 4, 3),
        # 227 KiB and what the driver takes are one processor's.
        ("sm_90", 64, 113 << 10, 4, 2),
        ("sm_86", 32, 1024, 8, 6),
        ("sm_80", 255, 163 << 10, 16, 1),
        ("gfx942", 128, 32 << 10, 4, 2),
        ("gfx942", 256, 1024, 4, 2),
    ],
)
def test_programs_that_a_processor_holds(
    arch: str, registers: int, shared: int, warps: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    assert load("compile_check").resident(arch, registers, shared, warps) == programs


def test_a_transposed_product_in_shared_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = load("compile_check")
    layouts = "#linear = #ttg.linear<{register = [[1, 0]]}>\n#mma = #ttg.nvidia_mma<{versionMajor = 3}>\n"
    product = "%1 = ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<64x64xbf16> -> tensor<64x64xf32, #mma>\n"
    stored = "%2 = ttg.local_alloc %t : (tensor<64x64xbf16, {}>) -> !ttg.memdesc<64x64xbf16, #shared>\n"
    assert check.stores_transposed(layouts + product + stored.format("#linear"))
    assert not check.stores_transposed(layouts + product + stored.format("#mma"))
    assert not check.stores_transposed(layouts + stored.format("#linear"))


def test_uniform_registers_that_nothing_wrote_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    unwritten = load("uniform").unwritten
    # What ptxas 12.8 made of a state's normaliser in 16 columns: the second step's address comes from UR5, not UR8.
    lines = [
        "S2UR UR6, SR_CgaCtaId",
        "UMOV UR30, UR31",
        "UIMAD.WIDE.U32 UR20, UR6, 0x3e0f83e1, URZ",
        "USGXT.U32 UR8, UR6, 0xe",
        "UMOV UR10, UR8",
        "UMOV UR11, 0xc0000010",
        "HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR8].tnspB, RZ, !UPT",
        "UIADD3 UR4, UP0, {}, 0x20, URZ",
        "UMOV UR7, URZ",
        "UIADD3.X UR5, UR7, -0x3ffffff0, URZ, UP0, !UPT",
        "UMOV UR10, UR4",
        "@P0 UMOV UR11, UR5",
        "UIADD3.64 UR22, UR10, 0x20, URZ",
        "HGMMA.64x16x16.F32.BF16 R24, R36, gdesc[UR8].tnspB, R24, gsb0",
        "@P1 LDG.E.64 R14, desc[UR20][R22.64+0x10]",
    ]
    code = "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))
    assert unwritten(code.format("UR5")) == ["UIADD3 UR4, UP0, UR5, 0x20, URZ"]
    assert unwritten(code.format("UR8")) == []
    # Where both operands are in shared memory, all four registers count; of a pair, both.
    both = code.format("UR8").replace("R24, R36, gdesc", "R24, gdesc")
    assert unwritten(both) == ["HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0"]
    assert len(unwritten(code.format("UR8").replace("UR10, 0x20, URZ", "UR8, 0x20, URZ"))) == 1
    # A copy of what is not there yet does no harm until it is used.
    assert unwritten(code.format("UR30")) == ["UIADD3 UR4, UP0, UR30, 0x20, URZ"]
    # What it made of the delta rule's values in 32 columns: UR7 is the upper half, and the address is not in it.
    halved = load("uniform").halved
    apart = code.replace("UMOV UR7, URZ", "UMOV UR12, URZ")
    assert halved(apart.format("UR8")) == []
    assert halved(apart.format("UR7")) == ["UIADD3.X UR5, UR7, -0x3ffffff0, URZ, UP0, !UPT"]
    # UR7 is written in between, and is two registers.
    assert halved(code.format("UR7")) == []


def test_what_the_kernels_refuse_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = load("compile_check")
    for release, refused in (("3.6.0", {"sm_100"}), ("3.9.0", set())):
        monkeypatch.setattr(check.triton, "__version__", release)
        assert {arch for arch in check.PROCESSORS if check.is_refused(arch)} == refused


def test_budget_covers_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = load("compile_check")
    known = json.loads(check.BUDGET.read_text())["kernels"]
    planned = {f"{config}/{launch.role}" for config in check.configs(full=False) for launch in check.launches(config)}
    assert set(known) == planned


def test_compile_check_sees_what_the_recipe_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = load("compile_check")
    sizes = {(c.arch, c.D, c.V, c.kind) for c in check.configs(full=False)}
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942"):
        assert {(arch, 256, 128, "recipe"), (arch, 128, 64, "recipe")} <= sizes
    found = {launch.role: launch for launch in check.launches(check.Config("sm_90", "bf16", 256, 128, 4, "recipe"))}
    assert {"state", "scan", "reverse_state", "decode"} <= set(found)
    # Delta is the window's to compute; where there is none, and sums are read from memory, `reverse_state` does.
    assert "delta" not in found
    assert found["reverse_state"].arguments["KNOWN"]
    alone = {launch.role: launch for launch in check.launches(check.Config("sm_90", "bf16", 64, 64, 4))}
    assert not alone["reverse_state"].arguments["KNOWN"]
    # The delta rule's read features alone, too, and know no map.
    walks = [
        launch
        for role, launch in found.items()
        if check.MULTIPLIES.match(role) and {"MASKED", "MAP"} <= launch.arguments.keys()
    ]
    assert any("forward" in launch.role for launch in walks)
    for launch in walks:
        assert launch.arguments["MAP"] == "identity"
        assert launch.arguments["MASKED"]
        assert launch.arguments["DELAYED"]
    packed = list(check.launches(check.Config("sm_90", "bf16", 256, 128, 4, "packed")))
    assert any(launch.arguments.get("VARLEN") for launch in packed)
    # What reads heads themselves, and no features.
    heads = {launch.role for launch in check.launches(check.Config("sm_90", "bf16", 128, 128, 4))}
    assert {
        "window",
        "window_dq",
        "window_dkv",
        "key_sums",
        "key_scan",
        "features",
        "features_backward",
        "hybrid",
    } <= heads
    # Too large for shared memory; features come in tiles.
    large = {launch.role for launch in check.launches(check.Config("sm_90", "fp32", 256, 256, 1))}
    assert not any(role.startswith("window") for role in large)
    assert "features" in large


def test_tuner_keeps_the_fastest_tile_and_other_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    tuner = load("tune")
    shipped = dict(tuner.plan.tile_table())
    key = ("sm_90", "bf16", "dk", 64, 64, 0)

    def launch_of(role: str, target: object, dtype: torch.dtype, D: int, V: int) -> object:
        tile = tuner.plan.tile_table()["sm_90", "bf16", role, D, V, 0]
        if tile.tokens == 64 and tile.width == 64:
            raise RuntimeError("out of shared memory")
        return tile

    monkeypatch.setattr(tuner, "launch_of", launch_of)
    # The best that fits is the widest with the fewest warps.
    monkeypatch.setattr(tuner, "time_ms", lambda tile, repeats: tile.warps / (tile.tokens * tile.width * tile.stages))
    monkeypatch.setattr(tuner.plan, "tile_table", tuner.plan.tile_table)
    rows = tuner.rows_of("sm_90", ["bf16"], [64], tuner.ROLES)
    assert key in rows
    table = tuner.tune(tuner.Target("sm_90", 132), rows, 1, tmp_path / "tiles.json")
    assert tuner.plan.parse_table((tmp_path / "tiles.json").read_text()) == table
    assert table[key] in (tuner.Tile(64, 32, 4, 3), tuner.Tile(32, 64, 4, 3))
    assert {k: t for k, t in table.items() if k[0] != "sm_90"} == {k: t for k, t in shipped.items() if k[0] != "sm_90"}
    assert table["sm_90", "bf16", "dk", 128, 128, 0] == shipped["sm_90", "bf16", "dk", 128, 128, 0]


def test_tuner_goes_on_in_a_new_process_where_one_has_lost_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    tuner = load("tune")
    lost = [True, False, False]
    made = []

    class Pool:
        def __init__(self, *_: object) -> None:
            made.append(self)
            self.open = True

        def submit(self, *_: object) -> object:
            assert self.open
            return types.SimpleNamespace(result=lambda: tuner.Timing(None, "AcceleratorError", lost=lost.pop(0)))

        def shutdown(self) -> None:
            self.open = False

    monkeypatch.setattr(tuner, "ProcessPoolExecutor", Pool)
    elsewhere = tuner.Elsewhere()
    for _ in range(3):
        elsewhere()
    assert [pool.open for pool in made] == [False, True]
    elsewhere.close()
    assert not made[-1].open


def test_tuner_tries_tiles_that_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    tuner = load("tune")
    for role in tuner.ROLES:
        tiles = list(tuner.candidates(role, 64))
        assert all(t.tokens >= 32 or role == "decode" for t in tiles)
        if role in tuner.OF_FEATURES:
            assert all(t.width % t.tokens == 0 for t in tiles)
        else:
            assert all(t.width <= 64 for t in tiles)
        if role in tuner.OF_WINDOW:
            assert all(tuner.BLOCK % t.tokens == tuner.BLOCK % t.width == 0 for t in tiles)


@pytest.mark.parametrize(
    ("role", "tokens"),
    [
        ("state", 128),
        ("stored_dkv", 64),
        ("stored_dv", 64),
        ("decode", 64),
        ("hybrid", 64),
        ("window_dkv", 64),
        ("features_backward", 64),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where a GPU is there")
def test_tuner_plans_real_launches(role: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    tuner = load("tune")
    target = tuner.Target("interpreter", 64)
    monkeypatch.setattr(tuner, "STORED_LENGTH", 32)
    D = 32 if role == "hybrid" else 16
    launch = tuner.launch_of(role, target, torch.float32, D, 16, tokens=tokens, heads=2, key_heads=1, device="cpu")
    assert launch.role == role
    launch.run()
