"""Exports as ONNX: what ONNX Runtime writes, where neither this package nor PyTorch is, is what ``generate`` writes."""

import json

import pytest
import torch

from hf_linear_attn.cli import main
from hf_linear_attn.errors import HFLinearAttnError
from hf_linear_attn.export import ExportSettings, export_model
from hf_linear_attn.export.plain import STANDARD_OPSET
from tests.export.students import RECIPES, SHAPES, generated, prompts, save, student, written_alone
from tests.export.test_export import check_padding

pytestmark = pytest.mark.optional

ALL = ("hf_linear_attn", "transformers", "torch", "triton", "onnx", "onnxscript")


def session_of(folder):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(folder / "model.onnx")

    def run(*inputs):
        fed = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
        return tuple(map(torch.as_tensor, session.run(None, fed)))

    return run


def nodes_of(graph):
    """Return the nodes of a graph and of those within it."""
    within = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return [*graph.node, *(node for one in within for node in nodes_of(one))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_writes_what_the_model_writes(shape, recipe, tmp_path):
    onnx = pytest.importorskip("onnx")
    model = student(shape, recipe)
    save(model, tmp_path / "student")
    main(["export", str(tmp_path / "student")])
    folder = tmp_path / "student-onnx"
    texts = prompts(20)
    expected = [generated(model, text) for text in texts]
    assert sum(len(set(text)) > 3 for text in expected) > 10
    assert written_alone(folder / "example.py", texts, ALL) == expected

    file = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert {node.domain for node in nodes_of(file.graph)} == {""}
    assert {opset.domain: opset.version for opset in file.opset_import} == {"": 18}
    # One file for every length, without a copy of anything for each token.
    assert [i.type.tensor_type.shape.dim[1].dim_param for i in file.graph.input[:2]] == ["tokens", "tokens"]
    check_padding(session_of(folder), model, json.loads((folder / "export.json").read_text()))


@pytest.mark.parametrize("recipe", ["recommended", "kept_learned"])
def test_the_number_of_nodes_is_that_of_the_layers(recipe, tmp_path):
    onnx = pytest.importorskip("onnx")
    numbers = []
    # The net of kept keys reads the means of up to 16 keys.
    for size in (20, 200):
        sizes = {"window": size, "kept": size} if "kept" in RECIPES[recipe] else {"window": size}
        save(student("llama", recipe, depth=1, **sizes), tmp_path / f"{size}", tokenizer=False)
        folder = export_model(ExportSettings(str(tmp_path / f"{size}"))).folder
        numbers.append(len(nodes_of(onnx.load(folder / "model.onnx").graph)))
    assert numbers[0] == numbers[1]
    assert b"/hf_linear_attn/" not in (folder / "model.onnx").read_bytes()


@pytest.mark.parametrize("recipe", ["recommended", "elu", "decay", "delta", "gated_delta"])
def test_linear_attention_is_the_standards_operator_where_there_is_one(recipe, tmp_path):
    onnx = pytest.importorskip("onnx")
    if onnx.defs.onnx_opset_version() < STANDARD_OPSET:
        pytest.skip("this release of onnx has no LinearAttention")
    model = student("llama", recipe)
    save(model, tmp_path / "student")
    folder = export_model(ExportSettings(str(tmp_path / "student"), opset=STANDARD_OPSET)).folder
    texts = prompts(10)
    assert written_alone(folder / "example.py", texts, ALL) == [generated(model, text) for text in texts]
    file = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert [(opset.domain, opset.version) for opset in file.opset_import] == [("", STANDARD_OPSET)]
    assert [node.op_type for node in nodes_of(file.graph)].count("LinearAttention") == 2
    check_padding(session_of(folder), model, json.loads((folder / "export.json").read_text()))


def test_newer_operators_are_written_where_there_are_any(tmp_path):
    onnx = pytest.importorskip("onnx")
    save(student("llama", "elu", depth=1), tmp_path / "student", tokenizer=False)
    folder = export_model(ExportSettings(str(tmp_path / "student"), opset=23)).folder
    assert onnx.load(folder / "model.onnx").opset_import[0].version == 23
    with pytest.raises(HFLinearAttnError, match=r"`opset` must be from 18 to \d+, got 999"):
        export_model(ExportSettings(str(tmp_path / "student"), output_dir=str(tmp_path / "out"), opset=999))
