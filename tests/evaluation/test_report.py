"""The report: what it says, and how it looks in a real browser."""

import copy
import html
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jsonschema
import pytest

from hf_linear_attn.evaluation import read_results, retrieval_view, schema, write_report
from hf_linear_attn.evaluation.figures import Axes, HeatCell, Series, heat_map, line_chart
from hf_linear_attn.evaluation.report import headlines
from hf_linear_attn.evaluation.results import add_comparisons, combine
from hf_linear_attn.evaluation.statistics import wilson_interval

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LENGTHS = (512, 2048, 8192, 32768)
MODELS = (
    ("model", "model", "linear", "hedgehog"),
    ("teacher", "teacher", "softmax", None),
    ("merely patched <b>", "baseline", "linear", "hedgehog"),
    ("window of 48 tokens alone, tuned like the student", "baseline", "linear", None),
)


def facts(name, role, attention, feature_map):
    return {
        "name": name, "role": role, "path": f"runs/{name}", "fingerprint": "0" * 64, "class": "LlamaForCausalLM",
        "parameters": 1_234_567, "dtype": "float32", "vocabulary": 1024, "layers": 4, "attention": attention,
        "attention_backend": "sdpa", "patched_layers": [f"model.layers.{i}.self_attn" for i in range(4)],
        "feature_map": feature_map, "window": 16, "linear_attention": None, "trained_length": 512,
        "position_limit": None,
    }  # fmt: skip


def cell(model, task, length, depth, hits, n=20, status="ok"):
    ok = status == "ok"
    scores = [1.0] * hits + [0.0] * (n - hits) if ok else []
    return {
        "model": model, "task": task, "length": length, "depth": depth, "n": len(scores),
        "score": hits / n if ok else None, "ci95": list(wilson_interval(hits, n)) if ok else None, "nulls": 0,
        "measured_tokens": length if ok else None, "status": status, "reason": None if ok else "Its positions end.",
        "prompts_sha256": f"{task}{length}{depth}" if ok else None, "scores": scores,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results():
    """Make results of four models by a rule, for the pictures' sake."""
    names = [name for name, *_ in MODELS]
    reach = dict(zip(names, (8192, 2048, 0, 512), strict=True))
    cells, latency, windows, positions, growing = [], [], [], [], []
    for m, name in enumerate(names):
        for task, depths in (("passkey", (0, 50, 100)), ("kv_recall:pairs=8", (0, 50, 100)), ("vt", (None,))):
            for length in LENGTHS:
                gone = name == "teacher" and length == 32768
                for depth in depths:
                    hits = 20 if length <= reach[name] else max(0, 9 - m * 3)
                    cells.append(cell(name, task, length, depth, hits, status="unsupported" if gone else "ok"))
        for length in LENGTHS:
            cost = length**1.6 / 500 if name == "teacher" else length / 20 + m
            decode = 1.5 + length / 3000 if name == "teacher" else 2.2 + m / 10
            latency.append(
                {
                    "model": name, "length": length, "status": "ok", "reason": None, "prompt_tokens": length - 64,
                    "decoded_tokens": 64, "batch_size": 1, "repeats": 10, "ttft_ms": cost,
                    "ttft_ms_iqr": [cost * 0.95, cost * 1.1], "prefill_tokens_per_s": 1000 * length / cost,
                    "decode_ms_per_token": decode, "decode_ms_per_token_iqr": [decode * 0.97, decode * 1.05],
                    "peak_mib": length / 100 if name == "teacher" else 12.0 + m, "peak_method": "tensor bytes",
                    "cache_bytes": length * 2048 if name == "teacher" else 150_000 + m,
                }
            )  # fmt: skip
            nll = 2.0 + 0.1 * m + (length / 40000 if name == "teacher" else 0)
            row = {
                "model": name, "length": length, "status": "ok", "reason": None, "windows": 9, "tokens": 40000,
                "nll_nats": nll, "perplexity": 2.718**nll,
                "perplexity_ci95": [2.718 ** (nll - 0.05), 2.718 ** (nll + 0.05)],
                "bits_per_byte": nll / 2, "kl_nats": None if name == "teacher" else 0.05 + m / 50,
                "agreement": None if name == "teacher" else 0.9 - m / 50,
            }  # fmt: skip
            windows.append(row)
            growing.append(row)
        for k in range(7):
            nll = 3.0 - 0.15 * k + 0.1 * m
            positions.append(
                {
                    "model": name, "window_length": 8192, "start": 64 << k, "stop": 128 << k, "windows": 5,
                    "tokens": 5000, "nll_nats": nll, "nll_nats_ci95": [nll - 0.05, nll + 0.05],
                    "perplexity": 2.718**nll,
                    "kl_nats": None if name == "teacher" else 0.05 + 0.01 * k,
                    "agreement": None if name == "teacher" else 0.9 - 0.01 * k,
                }
            )  # fmt: skip
    made = {
        "schema_version": 1,
        "environment": {"python": "3.11", "torch": "2.13.0", "device": "cpu", "threads": 1},
        "model": facts(*MODELS[0]),
        "references": [facts(*model) for model in MODELS[1:]],
        "args": {"seed": 0, "lengths": list(LENGTHS)},
        "cells": cells,
        "floors": [cell(name, "passkey", 512, 50.0, 0) for name in names],
        "perplexity": {
            "text": {
                "source": "a text", "documents": 3, "scored_tokens": 40000, "scored_bytes": 120000,
                "longest_document": 40000, "bos": True, "sha256": "1" * 64,
            },
            "windows": windows, "by_position": positions, "growing_context": growing,
        },
        "latency": latency,
        "lm_eval": [
            {
                "model": "model", "task": "niah_single_1", "length": 4096, "metric": "string_match", "value": 0.9,
                "ci95": [0.8, 0.95], "n": 50, "prompts_sha256": "2" * 64, "status": "ok",
            }
        ],
        "extras": {"linear_branch_off_nats": 0.31},
        "timing": {"created_at": "2026-01-01T00:00:00+00:00", "estimated_s": 100.0, "wall_s": 120.0},
    }  # fmt: skip
    return add_comparisons(made)


@pytest.fixture(scope="module")
def report(results, tmp_path_factory):
    return write_report(results, tmp_path_factory.mktemp("report"))


def test_the_summary_says_what_the_cells_say(results):
    quality = results["summary"]["quality"]
    assert quality[0].startswith("passkey: model holds to 8,192 tokens; teacher to 2,048 tokens; merely patched")
    assert "teacher cannot read 32,768 tokens or more: its positions end before." in quality
    assert any("closes" in sentence and "between window of 48 tokens alone" in sentence for sentence in quality)
    speed = " ".join(results["summary"]["speed"])
    decode = (1.5 + 32768 / 3000) / 2.2
    assert f"decode {decode:.1f}x faster" in speed
    assert f"the cache {32768 * 2048 / 150_000:.0f}x smaller" in speed
    assert re.search(r"costs less than teacher in prefill from [\d,]+ tokens, decode from [\d,]+ tokens", speed)


def test_costs_that_hardly_differ_are_called_the_same_and_a_loss_is_named(results):
    changed = copy.deepcopy(results)
    for row in changed["latency"]:
        row["batch_size"] = 4
        row["peak_mib"] = 10.3 if row["model"] == "model" else 10.0
    speed = add_comparisons(changed)["summary"]["speed"]
    assert speed[0].startswith("At 32,768 tokens in a batch of 4, model beside teacher: ")
    assert "peak memory above the weights about the same" in speed[0]
    assert speed[-1] == "model does not cost less than teacher in memory at the tested lengths."


def test_the_first_screen_says_in_figures_what_was_kept_and_what_was_gained(results, report):
    found = {one.label: one for one in headlines(results)}
    # The teacher has no score to keep beyond 2,048 tokens; of its vt the model keeps as much.
    kept = next(iter(found.values()))
    assert (kept.figure, kept.label) == (
        "100%",
        "of the teacher's score kept at 2,048 tokens: trained forms in noise",
    )
    assert (
        kept.detail
        == "passkey 100% (teacher 100%), kv_recall:pairs=8 100% (teacher 100%), vt 100% (teacher 100%); n = 60 or 20"
    )
    decode = (1.5 + 32768 / 3000) / 2.2
    assert found["faster decode at 32,768 tokens"].figure == f"{decode:.1f}x"
    assert found["smaller cache at 32,768 tokens"].figure == f"{32768 * 2048 / 150_000:.0f}x"
    assert found["smaller cache at 32,768 tokens"].detail == "146 KiB, teacher 64 MiB"
    # The teacher reads best at 512 tokens, though not as well as the model.
    expected = 2.718**2.0 / 2.718 ** (2.1 + 512 / 40000) - 1
    assert found["perplexity at 512 tokens"].figure == f"{expected:+.0%}"
    assert found["perplexity at 512 tokens"].detail == "7.388, teacher 8.27"
    text = report.read_text()
    first = text.index('<div class="headlines">')
    assert first < text.index("<details><summary>In words") < text.index("<h2>")
    assert all(f'<p class="figure">{one.figure}</p>' in text for one in found.values())
    assert f"| **{kept.figure}** | {kept.label} |" in (report.parent / "report.md").read_text()


def with_held_out(results):
    """Return results with held-out forms in text beside the trained ones in noise, as an evaluation makes them."""
    found = copy.deepcopy(results)
    # By model, of 20: the teacher itself fails at the second of the tasks.
    hits = {name: (16, 3) if name == "teacher" else (4 - m, 20) for m, (name, *_) in enumerate(MODELS)}
    found["capacity"] = []
    for name, scores in hits.items():
        for task, right in zip(("capital in text", "assignment in text"), scores, strict=True):
            facts = {"held_out": True, "haystack": "text", "chance": 0.25, "pairs": 4}
            found["cells"] += [cell(name, task, length, 0, right) | facts for length in (512, 2048)]
        for pairs in (4, 8, 16, 32, 64):
            facts = {"held_out": True, "haystack": "text", "chance": 1 / pairs, "pairs": pairs}
            right = 20 - pairs // 8 if name == "teacher" else 16 // pairs
            found["capacity"].append(cell(name, f"capital:pairs={pairs} in text", 2048, 0, right) | facts)
    return add_comparisons(found)


def test_held_out_forms_in_text_come_first_and_apart_from_trained_ones_in_noise(results, tmp_path):
    mixed = with_held_out(results)
    jsonschema.validate(mixed, schema())
    first, second, *_ = headlines(mixed)
    assert (first.figure, first.label) == ("25%", "of the teacher's score kept at 2,048 tokens: held-out forms in text")
    assert first.detail == (
        "capital in text 20% (teacher 80%); n = 20; not asked, for the teacher fails: assignment in text"
    )
    assert second.label == "of the teacher's score kept at 2,048 tokens: trained forms in noise"
    assert "assignment" not in second.detail
    said = "assignment in text: teacher itself finds no more than by chance at 512, 2,048 tokens, so nothing is asked"
    assert any(sentence.startswith(said) for sentence in mixed["summary"]["quality"])
    path = write_report(mixed, tmp_path)
    page, markdown = path.read_text(), (tmp_path / "report.md").read_text()
    for text, heading in ((page, "<h2>{}</h2>"), (markdown, "## {}")):
        places = [
            text.index(heading.format(title))
            for title in (
                "Score by length: held-out forms in text",
                "Score by length: trained forms in noise",
                "Score by number of pairs",
            )
        ]
        assert places == sorted(places)
    assert "| model | capital in text | held out | text | 512 | 0% | 20 | 20.0% |" in markdown
    assert "| model | capital:pairs=64 in text | held out | text | 2,048 | 0% | 20 | 0.0% |" in markdown
    svg = (tmp_path / "figures" / "capacity-capital-in-text-2048.svg").read_text()
    # A point for each number of pairs and model, whatever its marker.
    assert svg.count('class="line') == len(MODELS)
    assert re.findall(r'class="tick">(\d+)<', svg) == ["4", "8", "16", "32", "64"]


def test_runs_in_noise_and_in_text_are_compared_without_being_mixed(results):
    old, fresh = copy.deepcopy(results), with_held_out(results)
    for run, shift in ((old, 0), (fresh, 1)):
        for number, one in enumerate([run["model"], *run["references"]]):
            one["fingerprint"] = str(number or 9 - shift) * 64
    both = combine([("old", old), ("new", fresh)])
    kinds = retrieval_view.kinds_of(both)
    assert [str(kind) for kind in kinds] == ["held-out forms in text", "trained forms in noise"]
    assert [len(tasks) for tasks in kinds.values()] == [2, 3]
    assert len(both["capacity"]) == len(fresh["capacity"])
    # What leads was never asked a held-out form, so none is claimed of it.
    assert [one.label for one in headlines(both) if "forms" in one.label] == [
        "of the teacher's score kept at 2,048 tokens: trained forms in noise"
    ]
    assert {row["task"] for row in both["cells"] if row["model"] == "old"} == {"passkey", "kv_recall:pairs=8", "vt"}


def test_figures_that_are_no_gain_say_so(results):
    slow = copy.deepcopy(results)
    for row in slow["latency"]:
        if row["model"] == "model":
            row.update(decode_ms_per_token=50.0, cache_bytes=32768 * 2048 * 3)
    labels = {one.label: one.figure for one in headlines(slow)}
    assert labels["slower decode at 32,768 tokens"] == "4.0x"
    assert labels["larger cache at 32,768 tokens"] == "3.0x"
    alone = copy.deepcopy(results)
    alone["references"] = []
    for part in ("cells", "latency", "floors"):
        alone[part] = [row for row in alone[part] if row["model"] == "model"]
    windows = alone["perplexity"]["windows"]
    alone["perplexity"]["windows"] = [row for row in windows if row["model"] == "model"]
    assert [one.label for one in headlines(alone)] == [
        "score at 32,768 tokens: trained forms in noise",
        "perplexity at 32,768 tokens",
    ]


def test_saved_results_are_read_and_say_what_they_said():
    """What was saved before suites were files."""
    saved = read_results(Path(__file__).parents[2] / "docs" / "results" / "quickstart")
    jsonschema.validate(saved, schema())
    found = add_comparisons(saved)
    for part in ("effective_length", "paired", "gap_closed", "break_even", "summary"):
        assert found[part] == saved[part], part
    both = combine([("old", saved), ("again", saved)])
    names = {row["model"] for row in saved["cells"]}
    assert len(names) == 4
    assert {row["model"] for row in both["cells"]} == names - {"model"} | {"old"}
    assert len(both["cells"]) == len(saved["cells"])


def test_the_page_is_one_file_without_a_network(report):
    text = report.read_text()
    assert not re.findall(r"<(?:script|iframe|img|object)|@import|url\(", text)
    links = set(re.findall(r"(?:src|href)=[\"']([^\"']+)", text))
    assert links == {"data:,"}
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_names_are_escaped(report):
    text = report.read_text()
    assert "merely patched <b>" not in text
    assert "merely patched &lt;b&gt;" in text


def test_every_picture_is_well_formed_and_written_by_itself(report, results):
    inline = re.findall(r"<figure.*?(<svg.*?</svg>)</figure>", report.read_text(), flags=re.DOTALL)
    # Score for 3 tasks, heat maps for 2 tasks and 4 models, 5 of perplexity, 4 of latency.
    assert len(inline) == 3 + 8 + 5 + 4
    for svg in inline:
        ElementTree.fromstring(svg)
    files = sorted((report.parent / "figures").glob("*.svg"))
    assert len(files) == 20
    for path in files:
        ElementTree.fromstring(path.read_text())
    markdown = (report.parent / "report.md").read_text()
    assert set(re.findall(r"\]\((figures/[^)]+)\)", markdown)) == {f"figures/{path.name}" for path in files}


def test_the_markdown_holds_every_cell(report, results):
    markdown = (report.parent / "report.md").read_text()
    table = markdown.split("## Retrieval cells")[1].split("\n## ")[0]
    assert len([line for line in table.splitlines() if line.startswith("|")]) == 2 + len(results["cells"]) + 4
    assert "| teacher | passkey | trained | noise | 32,768 | 50% | 0 | unsupported |" in table


def test_large_numbers_are_written_out_and_speed_says_for_which_batch(report):
    markdown = (report.parent / "report.md").read_text()
    table = markdown.split("## Latency and memory")[1].split("\n## ")[0]
    # 512 tokens in 25.6 ms.
    assert "| model | 512 | 1 | 10 | 20,000 | 25.6 |" in table
    assert not re.search(r"\de[+]\d", markdown)
    assert "<span>milliseconds per token, batch of 1</span>" in report.read_text()


def test_without_plots_there_are_tables_only(results, tmp_path):
    text = write_report(results, tmp_path, plots=False).read_text()
    assert "<figure" not in text
    assert "<table>" in text
    assert not (tmp_path / "figures").exists()


def test_a_chart_puts_points_where_they_belong():
    svg = line_chart(
        "t", [Series("a", 0, [(100, 0.0, None, None), (400, 1.0, None, None)])], Axes("x", "y", y_range=(0, 1))
    )
    (a, b) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert float(a[0]) < float(b[0])
    assert float(a[1]) > float(b[1])
    middle = line_chart(
        "t", [Series("a", 0, [(x, 0.5, None, None) for x in (100, 200, 400)])], Axes("x", "y", y_range=(0, 1))
    )
    xs = [float(x) for x, _ in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', middle)]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)


def test_a_heat_map_shows_each_field_in_its_row_and_column():
    cells = [
        [HeatCell("7", 0.07, "low"), HeatCell("n/a", None, "why")],
        [HeatCell("93", 0.93, "high"), HeatCell("", None, "-")],
    ]
    svg = heat_map("t", ["c1", "c2"], ["r1", "r2"], cells, "x", "y")
    assert re.findall(r'fill-opacity="([\d.]+)"', svg) == ["0.070", "0.930"]
    assert svg.index("r1") < svg.index(">7<") < svg.index(">n/a<") < svg.index("r2") < svg.index(">93<")


PROBE = """
<script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message)));
addEventListener("load", () => {
  if (OPEN) document.querySelectorAll("details").forEach(d => { d.open = true; });
  const root = document.documentElement, wide = root.clientWidth;
  const found = {errors, wide, scroll: root.scrollWidth};
  found.outside = [...document.querySelectorAll("h1,h2,p,li,figure,figcaption,summary,.scroll")].filter(e => {
    const r = e.getBoundingClientRect();
    return r.left < -0.5 || r.right > wide + 0.5 || (e.className != "scroll" && e.scrollWidth > e.clientWidth + 1);
  }).map(e => e.tagName + ": " + e.textContent.slice(0, 40));
  found.figures = [...document.querySelectorAll("figure")].map(f => {
    const svg = f.querySelector("svg"), box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const texts = [...svg.querySelectorAll("text")].map(t => {
      const r = t.getBoundingClientRect();
      return [r.left >= box.left - 1 && r.right <= box.right + 1 && r.top >= box.top - 1 && r.bottom <= box.bottom + 1,
              t.textContent, r.height];
    });
    return {id: f.id, width: box.width, height: box.height, shapes: svg.querySelectorAll("path,rect,circle").length,
            cut: texts.filter(t => !t[0]).map(t => t[1]), smallest: Math.min(...texts.map(t => t[2]))};
  });
  found.ink = getComputedStyle(document.body).color;
  found.tables = [...document.querySelectorAll("table")].map(
    t => t.checkVisibility() ? t.getBoundingClientRect().height : 0);
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255;
    return sum + weight * (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)];
    return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length == 3 || c[3] > 0) return c;
    }
  };
  const field = text => [...text.parentElement.querySelectorAll("rect")].reduce((under, rect) => {
    const style = getComputedStyle(rect), over = rgb(style.fill), share = Number(style.fillOpacity);
    return under.map((c, i) => c + share * (over[i] - c));
  }, behind(text));
  found.paper = behind(document.body);
  found.pale = [
    ...[...document.querySelectorAll("h1,h2,p,li,th,td,summary,figcaption,figcaption span")].map(
      e => [contrast(rgb(getComputedStyle(e).color), behind(e)), e.textContent]),
    ...[...document.querySelectorAll("svg text")].map(t => {
      const under = t.parentElement.tagName == "g" ? field(t) : behind(t);
      return [contrast(rgb(getComputedStyle(t).fill), under), t.textContent];
    }),
    ...[...document.querySelectorAll(".line")].map(
      e => [contrast(rgb(getComputedStyle(e).stroke), behind(e)), "line"]),
  ].filter(([ratio, text]) => ratio < (text == "line" ? 3 : 4.5))
   .map(([ratio, text]) => ratio.toFixed(1) + " " + text.slice(0, 40));
  const pre = document.createElement("pre");
  pre.id = "probe"; pre.textContent = JSON.stringify(found); parent.document.body.append(pre);
});
</script>
"""


def look(report, tmp_path, width, dark, *, printed=False):
    """Open the report in Chromium with a script that measures it; return what it measured and the console's lines.

    A printed page is one whose rules for print hold on the screen; what is folded away there stays so.
    """
    text = report.read_text().replace("</title>", "</title>" + PROBE.replace("OPEN", "false" if printed else "true"), 1)
    inside = html.escape(text.replace("@media print", "@media all") if printed else text, quote=True)
    # Chromium opens no window narrower than 500 pixels; a frame may be as narrow as a phone.
    page = tmp_path / "probe.html"
    page.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{inside}"></iframe>'
    )
    found = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    probe = re.search(r'<pre id="probe">(.*?)</pre>', found.stdout, flags=re.DOTALL)
    assert probe, found.stderr[-2000:]
    return json.loads(html.unescape(probe[1])), [line for line in found.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_in_a_browser_whole_and_without_errors(report, tmp_path, width, dark):
    found, console = look(report, tmp_path, width, dark)
    assert found["errors"] == []
    assert console == []
    assert found["wide"] == width
    assert found["scroll"] <= width
    assert found["outside"] == []
    assert len(found["figures"]) == 20
    for figure in found["figures"]:
        assert figure["width"] > 0.8 * min(width, 300), figure
        assert figure["height"] > 80, figure
        assert figure["shapes"] >= 6, figure
        assert figure["cut"] == [], figure
        assert figure["smallest"] >= 9, figure
    assert found["ink"] == ("rgb(232, 234, 237)" if dark else "rgb(28, 32, 36)")
    assert found["pale"] == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_on_paper_it_is_dark_on_white_and_holds_every_table(report, tmp_path):
    # The width of A4 between its margins, printed from a screen that is dark.
    found, _ = look(report, tmp_path, 718, dark=True, printed=True)
    assert found["paper"] == [255, 255, 255]
    assert found["ink"] == "rgb(0, 0, 0)"
    assert found["pale"] == []
    assert found["scroll"] <= 718
    assert len(found["tables"]) == report.read_text().count("<table>")
    assert min(found["tables"]) > 20
