"""Export a saved model: check what was asked, trace it, write it, and compare what was written with the model."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from transformers import PreTrainedModel

from hf_linear_attn.checks import check_types
from hf_linear_attn.encoders import is_encoder
from hf_linear_attn.errors import ArgumentError, CheckpointError, UnsupportedError, first_line
from hf_linear_attn.export.example import Format, example
from hf_linear_attn.export.graph import Graph, trace
from hf_linear_attn.export.plain import STANDARD_OPSET, UNTIL_CONVERTED
from hf_linear_attn.files import output_folder, paths_read, whole_folder
from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.loading import load_model, load_tokenizer, load_users_maps, position_limit

OLDEST_OPSET = 18
"""The first that PyTorch's exporter writes without converting, and what is written unless another is asked for."""

FILES: dict[Format, str] = {"onnx": "model.onnx", "torch": "model.pt2"}

LARGEST_DIFFERENCE = 1e-3
"""Of logits from the model's own, over the largest of them: hundreds of times what fp32 rounds."""


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export.

    Args:
        model: Folder or hub name of a converted causal language model.
        format: ``onnx`` for ONNX Runtime and others, ``torch`` for ``torch.export.load``.
        output_dir: Folder to write to; the model's folder with ``-onnx`` or ``-torch`` behind it where it is not set.
        opset: Version of ONNX's operators, 18 or newer; from 27 on its LinearAttention is one.
        overwrite: Replace files of the same names.
        feature_map_file: Python file that registers the feature map of your own model.
    """

    model: str
    format: Format = "onnx"
    output_dir: str | None = None
    opset: int | None = None
    overwrite: bool = False
    feature_map_file: str | None = None

    def __post_init__(self) -> None:
        check_types(self)


class Exported(NamedTuple):
    """What was written.

    Attributes:
        folder: Where.
        size_mib: Size of the model's files.
        tokens: Tokens of the text on which it was compared with the model.
        difference: The largest difference of a logit.
        tokenizer: Whether there is a tokenizer beside it.
    """

    folder: Path
    size_mib: float
    tokens: int
    difference: float
    tokenizer: bool


def export_model(settings: ExportSettings) -> Exported:
    """Write a model as a graph that runs without this package.

    Args:
        settings: What to export, and how.

    Returns:
        What was written. The folder has all of it or, where something failed, nothing.

    Raises:
        ArgumentError: If the format, the opset or the folder cannot be used.
        CheckpointError: If the model cannot be loaded, or the file does not give its logits.
        UnsupportedError: If the model cannot be traced, or keeps something that grows with the context.
    """
    opset = _checked_opset(settings)
    folder = _folder(settings)
    load_users_maps(settings.feature_map_file)
    model = load_model(
        settings.model,
        attention="linear",
        remedy="Convert it first: `hf-linear-attn distill`, or patch_model and save_pretrained.",
        dtype=torch.float32,
    )
    if is_encoder(model):
        remedy = "An encoder hands no states over: torch.export.export takes it as it is."
        raise UnsupportedError("model", "be a causal language model", type(model).__name__, remedy)
    model.requires_grad_(False)
    with _quiet():
        graph = trace(model, standard=opset is not None and opset >= STANDARD_OPSET)
        onnx = None if opset is None else _onnx(graph, opset)
    with whole_folder(folder) as temporary:
        path = temporary / FILES[settings.format]
        with _quiet():
            onnx.save(path) if onnx is not None else _save_program(graph.program, path)
        size = sum(file.stat().st_size for file in temporary.iterdir())
        tokens, difference = _compare(model, graph, path, settings)
        about = _about(model, graph, settings, opset)
        (temporary / "export.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        (temporary / "example.py").write_text(example(settings.format), encoding="utf-8")
        tokenizer = _save_tokenizer(settings.model, temporary)
    return Exported(folder, size / 2**20, tokens, difference, tokenizer)


def _checked_opset(settings: ExportSettings) -> int | None:
    """Return the version of ONNX's operators; None for another format."""
    if settings.format == "torch" and settings.opset is not None:
        raise ArgumentError("opset", "be left out where the format is torch", settings.opset, "It is ONNX's.")
    opset = OLDEST_OPSET if settings.opset is None else settings.opset
    if opset < OLDEST_OPSET:
        remedy = f"Leave it out for {OLDEST_OPSET}, which every runtime of today reads."
        raise ArgumentError("opset", f"be {OLDEST_OPSET} or newer", opset, remedy)
    if settings.format == "torch":
        return None
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        remedy = f"Install {', '.join(missing)}: pip install 'hf_linear_attn[export]'; or use --format torch."
        raise ArgumentError("format", "be one whose packages are installed", "onnx", remedy)
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        remedy = f"That is the newest that the installed onnx {onnx.__version__} has."
        raise ArgumentError("opset", f"be from {OLDEST_OPSET} to {newest}", opset, remedy)
    return opset


def _folder(settings: ExportSettings) -> Path:
    """Return the folder to write to; what it would lose, or share with the model's, is told before anything is run."""
    if settings.output_dir is not None:
        folder = Path(settings.output_dir)
    elif Path(settings.model).is_dir():
        model = Path(settings.model).resolve()
        folder = model.with_name(f"{model.name}-{settings.format}")
    else:
        raise ArgumentError(
            "output_dir", "be set where the model is no folder here", None, "Name one: --output-dir FOLDER."
        )
    inputs = paths_read(settings, ("model", "feature_map_file"))
    return output_folder(folder, inputs=inputs, marks=[".saving.tmp"], overwrite=settings.overwrite)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to themselves what PyTorch's exporters warn of: packages that are not asked for, and code of their own."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _save_program(program: ExportedProgram, path: Path) -> None:
    """Write a program without the paths of the source files that it was traced from."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    # By Python: torch's own writer ends the process where the disk is full.
    held = io.BytesIO()
    torch.export.save(program, held)
    path.write_bytes(held.getbuffer())


def _onnx(graph: Graph, opset: int) -> Any:
    """Return a graph as torch's ``ONNXProgram``, without the paths of the source files that it was traced from."""
    from onnxscript import optimizer

    names = list(graph.states)
    # By which sizes that are free go in the file.
    sizes = {0: "rows", 1: "tokens"}
    of_states = tuple({0: "rows"} if x.ndim else {} for x in graph.states.values())
    try:
        program: Any = torch.onnx.export(
            graph.program,
            args=(),
            input_names=["input_ids", "attention_mask", *(f"past.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
            opset_version=opset,
            dynamic_shapes=(sizes, sizes, of_states),
            verbose=False,
            # Its rules leave out additions of less than 1e-8, such as those that keep logarithms of 0 finite.
            optimize=False,
        )
    except Exception as error:  # whatever the exporter raises of an operator that it does not know
        rule = f"be made of operators that ONNX's opset {opset} has"
        remedy = f"PyTorch's exporter ended with: {first_line(error)}. Use --format torch, or a newer --opset."
        raise UnsupportedError("model", rule, "another", remedy) from error
    optimizer.inline(program.model)
    optimizer.fold_constants(program.model, onnx_shape_inference=True)
    optimizer.remove_unused_nodes(program.model)
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
        if node.domain == UNTIL_CONVERTED:
            node.domain = ""
    program.model.opset_imports.pop(UNTIL_CONVERTED, None)
    return program


def _compare(model: PreTrainedModel, graph: Graph, path: Path, settings: ExportSettings) -> tuple[int, float]:
    """Read a text in three pieces with the file and at once with the model.

    Returns:
        Its number of tokens, and the largest difference of a logit.
    """
    config = model.config.get_text_config()
    held = [part.settings for part in model.modules() if isinstance(part, LinearAttention)]
    beyond = max((one.window or 0) + one.sinks + one.kept for one in held) + 16
    tokens: int = min(beyond, position_limit(model) or beyond)
    ids = torch.arange(tokens)[None] * 7919 % config.vocab_size
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits
    try:
        read = _runner(path, settings.format)
        states, found = list(graph.states.values()), []
        for a, b in ((0, tokens // 3), (tokens // 3, tokens - 1), (tokens - 1, tokens)):
            logits, *states = read(ids[:, a:b], torch.ones(1, b - a, dtype=torch.long), *states)
            found.append(logits)
        difference = float((torch.cat(found, 1) - own).abs().max())
    except Exception as error:  # whatever a runtime raises of a file that it cannot run
        remedy = f"It ended with: {first_line(error)}. Choose another --opset or --format."
        raise CheckpointError("format", "give a file that runs here", settings.format, remedy) from error
    if not difference <= LARGEST_DIFFERENCE * float(own.abs().max()):
        rule = "give the model's own logits"
        remedy = "Choose another --opset or --format, and report it: nothing was written."
        raise CheckpointError("format", rule, f"a difference of {difference:.3g}", remedy, where=settings.format)
    return tokens, difference


def _runner(path: Path, format: Format) -> Any:
    """Return a function that runs a file on tensors."""
    if format == "torch":
        module = torch.export.load(path).module()

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                found: tuple[Tensor, ...] = module(*inputs)
            return found

        return run
    import onnx
    import onnxruntime

    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path)
    names = [one.name for one in session.get_inputs()]

    def run_onnx(*inputs: Tensor) -> tuple[Tensor, ...]:
        fed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return tuple(map(torch.as_tensor, session.run(None, fed)))

    return run_onnx


def _about(model: PreTrainedModel, graph: Graph, settings: ExportSettings, opset: int | None) -> dict[str, Any]:
    """Return what a program that runs the file needs to know."""
    config = model.config.get_text_config()
    ends = model.generation_config.eos_token_id if model.generation_config is not None else config.eos_token_id
    return {
        "format": settings.format,
        "file": FILES[settings.format],
        "opset": opset,
        "model": type(model).__name__,
        "linear_attention": model.config.linear_attention,
        "vocab_size": config.vocab_size,
        "eos_token_id": ends if isinstance(ends, list) else [] if ends is None else [ends],
        "inputs": ["input_ids", "attention_mask", "the states in order"],
        "outputs": ["logits", "the states in order"],
        "states": [
            {"name": name, "shape": ["rows", *x.shape[1:]] if x.ndim else [], "dtype": str(x.dtype).split(".")[1]}
            for name, x in graph.states.items()
        ],
    }


def _save_tokenizer(model: str, folder: Path) -> bool:
    try:
        load_tokenizer(model).save_pretrained(folder)
    except CheckpointError:
        # Token ids are all that a graph reads.
        return False
    return True
