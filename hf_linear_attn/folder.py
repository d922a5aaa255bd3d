"""What is refused in a model's folder before Transformers reads it: everything that reaches out of it, or runs.

A folder is data. Code that lies in it, or that it names, is not run; files outside of it are not read; and a config
that no machine could build is refused instead of tried.
"""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_linear_attn.checks import check_path
from hf_linear_attn.errors import CheckpointError, first_line

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
"""Arguments of Transformers' ``from_pretrained`` that say where files come from."""

MOST_LAYERS = 2**10
LARGEST_SIZE = 2**31 - 1
MOST_LEVELS = 32
"""Bounds of a config: layers are built one by one, sizes are those of tensors, and levels are read recursively."""

SUFFIX = ".safetensors"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SIZE = re.compile(r"layer|head|size|dim|expert|position|ctx|vocab|rank|state")
_LAYERS = re.compile(r"(num_\w*|n_?|_)layers?$|^depths?$|num_blocks$")
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?$")


def check_folder(name: str | Path, argument: str, **options: Any) -> dict[str, Any]:
    """Read a model's config, of a folder or by its hub name, and refuse what no model's folder needs.

    Args:
        name: A folder, a config.json or a hub name.
        argument: What the caller calls it, for messages.
        **options: Some of :data:`HUB_OPTIONS`.

    Raises:
        ArgumentTypeError: If ``name`` is neither a text nor a path.
        CheckpointError: If there is no config, or the folder names files outside of it, code, or absurd sizes.
    """
    folder = check_path(argument, name) / (options.get("subfolder") or "")
    if folder.is_dir():
        _check_files(folder, argument)
    elif not Path(name).exists() and not _HUB_NAME.fullmatch(str(name)):
        raise no_model(argument, name, f"There is none.{_nearest(name)}")
    try:
        config: dict[str, Any] = PreTrainedConfig.get_config_dict(name, **options)[0]
    except Exception as error:  # whatever Transformers raises of a file that is none of its own
        raise no_model(argument, name, why_not_loaded(name, error)) from error
    try:
        _check_value(config, "", 0)
    except ValueError as error:
        raise CheckpointError(argument, "have a config that can be built", str(name), f"{error}.") from error
    return config


def check_weights(
    info: Mapping[str, Any], argument: str, kind: str, name: str | Path, where: str, otherwise: str = ""
) -> None:
    """Refuse a checkpoint in which weights are missing, by what Transformers' ``output_loading_info`` says of it.

    They would be drawn at random; those that are tied to others are not missing there.

    Raises:
        CheckpointError: If any is missing, or has another shape than the model's.
    """
    drawn = sorted([*info["missing_keys"], *(f"{key[0]} of the model's shape" for key in info["mismatched_keys"])])
    if drawn:
        more = f" and {len(drawn) - 3} more" if len(drawn) > 3 else ""
        remedy = f"which would be drawn at random: name a checkpoint with them{otherwise}."
        remedy = f"It lacks {', '.join(drawn[:3])}{more}, {remedy}"
        raise CheckpointError(argument, f"hold all weights of {kind}", str(name), remedy, where=where)


def no_model(argument: str, name: str | Path, remedy: str) -> CheckpointError:
    """Return the error of a name under which there is no model's config."""
    return CheckpointError(argument, "be a folder or hub name with a model's config.json", str(name), remedy)


def why_not_loaded(name: str | Path, error: BaseException) -> str:
    """Return the remedy for a folder that could not be loaded: its likely name, where it is mistyped."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f", {type(error).__name__}"
    reason = f"Loading it failed{kind}: {first_line(error)}"
    return reason if Path(name).exists() else f"No folder of that name is here.{_nearest(name)} {reason}"


def _nearest(name: str | Path) -> str:
    """Ask whether a folder of a similar name is meant, if there is one."""
    path = Path(name)
    try:
        beside = [x.name for x in path.parent.iterdir() if x.is_dir()]
    except OSError:
        beside = []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {str(path.parent / near[0])!r}?" if near else ""


def _check_files(folder: Path, argument: str) -> None:
    for path in folder.iterdir():
        # A pipe or a device would be read without end.
        if not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                argument, "hold files and folders only", path.name, "Remove what is none.", where=str(folder)
            )
    if (folder / "adapter_config.json").exists() and (folder / "config.json").exists():
        rule = "hold a model without adapters beside it"
        remedy = "They name another model to load in its place: merge them with PEFT's merge_and_unload, and save that."
        raise CheckpointError(argument, rule, "adapter_config.json", remedy, where=str(folder))
    for index in folder.glob(f"*{SUFFIX}.index.json"):
        for file in _files_of(index, argument):
            if not isinstance(file, str) or Path(file).name != file or "\\" in file or Path(file).suffix != SUFFIX:
                rule = "name safetensors files beside its index only"
                raise CheckpointError(argument, rule, file, "Save the model again.", where=str(index))


def _files_of(index: Path, argument: str) -> list[Any]:
    try:
        return list(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            argument, "have a whole index of weights", index.name, f"Reading it failed: {first_line(error)}"
        ) from error


def _check_value(value: Any, name: str, level: int) -> None:
    """Raise a ValueError that says what of a config is too large, too deep, or code."""
    if level > MOST_LEVELS:
        raise ValueError(f"It is nested deeper than {MOST_LEVELS} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_value(item, str(key), level + 1)
    elif isinstance(value, list):
        for item in value:
            _check_value(item, name, level + 1)
    elif isinstance(value, str):
        # Transformers fetches a kernel by such a name, and runs it.
        if _IMPLEMENTATION.match(name) and "/" in value:
            raise ValueError(f"Its `{name}` names code to fetch, {value!r}: take it out")
    elif isinstance(value, int) and not isinstance(value, bool):
        layers = _LAYERS.search(name)
        limit = MOST_LAYERS if layers else LARGEST_SIZE
        if (layers or _SIZE.search(name)) and abs(value) > limit:
            raise ValueError(f"Its `{name}` is beyond {limit}")
