"""README's pictures and table say what docs/results holds."""

import copy
import json
import xml.etree.ElementTree

import pytest

from tools import front


@pytest.fixture(scope="module")
def results():
    names = ("cpu.json", "quickstart/results.json")
    return [json.loads((front.RESULTS / name).read_text()) for name in names]


def test_nothing_is_out_of_date():
    front.main(["--check"])


def test_a_changed_result_is_noticed(monkeypatch, results):
    cpu, demo = results
    worse = copy.deepcopy(demo)
    for row in worse["perplexity"]["windows"]:
        row["nll_nats"] += 1
    assert front.table(worse) != front.table(demo)
    slower = copy.deepcopy(cpu)
    slower["lengths"][-1]["forward"]["ratio"] = 3.0
    assert " 3 times as fast as softmax" in front.cost(slower, demo)
    monkeypatch.setattr(front, "table", lambda _: "| another |")
    with pytest.raises(SystemExit, match=r"out of date: README\.md\. Run `python -m tools\.front`"):
        front.main(["--check"])


def test_pictures_hold_every_line_and_its_name(results):
    cpu, demo = results
    for picture, lines in ((front.draw_cost(cpu, demo), 4), (front.draw_recall(demo), 8)):
        root = xml.etree.ElementTree.fromstring(picture)
        paths = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("class") == "line"]
        names = len([None for svg in root.iter("{http://www.w3.org/2000/svg}svg") if svg.get("class") == "swatch"])
        assert len(paths) == lines + names
        assert "prefers-color-scheme: dark" in picture


def test_a_cache_is_that_of_one_sequence_however_many_were_measured(results):
    cpu, demo = results
    more = copy.deepcopy(demo)
    more["args"]["batch_size"] += 1
    for row in more["latency"]:
        if row["status"] == "ok":
            row |= {"batch_size": 3 * row["batch_size"], "cache_bytes": 3 * row["cache_bytes"]}
    assert front.draw_cost(cpu, more) == front.draw_cost(cpu, demo)
    assert front.table(more) == front.table(demo)
