"""Encoders: their classes, how a text's embedding is pooled, and the folders of sentence-transformers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError, CheckpointError, first_line

MODULES = "modules.json"
"""What sentence-transformers lists its modules in: a Transformer, a pooling, and what comes after."""

BESIDE = ("config_sentence_transformers.json", "sentence_bert_config.json", "sentence_roberta_config.json")
"""Its other files that a student needs."""


def _mean(hidden: Tensor, mask: Tensor, power: float = 1.0) -> Tensor:
    weights = mask.to(hidden.dtype)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1e-9) ** power


def _cls(hidden: Tensor, mask: Tensor) -> Tensor:
    # The first token that is real: rows may be padded on the left.
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.int().argmax(1)]


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    ends = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), ends]


def _largest(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(~mask.bool()[..., None], torch.finfo(hidden.dtype).min).amax(1)


def _weighted(hidden: Tensor, mask: Tensor) -> Tensor:
    return _mean(hidden, mask * torch.arange(1, mask.shape[1] + 1, device=mask.device))


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _cls,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda hidden, mask: _mean(hidden, mask, 0.5),
    "weightedmean": _weighted,
    "lasttoken": _last,
}
"""How hidden states ``[B, T, D]`` and the mask ``[B, T]`` of real tokens become embeddings ``[B, D]``.

Names and order of those that are joined are sentence-transformers'.
"""


class Pooling(NamedTuple):
    """How a text's embedding is made of its tokens' hidden states."""

    modes: tuple[str, ...] = ("mean",)
    """Some of :data:`POOLINGS`; several stand one after the other in the embedding."""

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings ``[B, D]`` of hidden states ``[B, T, D]``; ``mask [B, T]`` says which tokens are real."""
        return torch.cat([POOLINGS[mode](hidden, mask) for mode in self.modes], -1)


def pooling_of(name: str | None, asked: str | None = None) -> Pooling:
    """Return how a model's embeddings are pooled.

    Args:
        name: Its folder or hub name, or None for a model in memory.
        asked: One of :data:`POOLINGS`, or some joined by ``+``; None for what the model's folder says, the mean of the
            tokens where that says nothing.

    Raises:
        ArgumentError: If it is no known pooling.
        CheckpointError: If the folder's description of its pooling cannot be used.
    """
    if asked is not None:
        modes = asked.split("+")
        if not set(modes) <= POOLINGS.keys():
            raise ArgumentError("pooling", "be known", asked, "Use one of those, or join some by +", available=POOLINGS)
        return Pooling(tuple(mode for mode in POOLINGS if mode in modes))
    for module in sentence_modules(name):
        if module["type"].endswith("Pooling"):
            return _read_pooling(str(name), str(module["path"]))
    return Pooling()


def _read_pooling(name: str, folder: str) -> Pooling:
    config = _read_json(name, f"{folder}/config.json")
    if not isinstance(config, dict):
        raise _unusable(name, f"{folder}/config.json is missing or no JSON object")
    flags = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}
    chosen = [mode for mode in POOLINGS if config.get(f"pooling_mode_{flags.get(mode, mode)}")]
    if config.get("pooling_mode"):
        chosen = [mode for mode in POOLINGS if mode in str(config["pooling_mode"]).split("+")]
    if not chosen:
        raise _unusable(name, f"{folder}/config.json names no pooling that is known")
    return Pooling(tuple(chosen))


def _unusable(name: str, reason: str) -> CheckpointError:
    return CheckpointError("pooling", "be described by the model's folder", name, f"{reason}: pass pooling='mean'.")


def sentence_modules(name: str | None) -> list[dict[str, Any]]:
    """Return the modules of a sentence-transformers model, none where a model is not one.

    Raises:
        CheckpointError: If their list cannot be read, or the Transformer does not lie at the folder's root.
    """
    modules = None if name is None else _read_json(name, MODULES)
    if modules is None or name is None:
        return []
    if not isinstance(modules, list) or not all(
        isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
        for module in modules
    ):
        raise _unusable(name, f"{MODULES} is no list of modules")
    first = modules[0]["path"] if modules else ""
    if first not in ("", "."):
        remedy = f"Name {name}/{first}, and pass pooling=... for what stands beside it."
        raise CheckpointError("model", "have its Transformer at the folder's root", name, remedy)
    if any(".." in Path(module["path"]).parts or Path(module["path"]).is_absolute() for module in modules):
        raise CheckpointError("model", "name modules inside its folder", name, "Use a folder from a source you trust.")
    return modules


def _read_json(name: str, file: str) -> Any:
    """Return what a JSON file of a model holds, None where there is no such file."""
    path = Path(name) / file
    if not Path(name).is_dir():
        try:
            path = Path(hf_hub_download(name, file))
        except (OSError, ValueError):  # there is none, or no hub
            return None
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(name, f"reading {file} failed ({first_line(error)})") from error


def copy_sentence_files(name: str | None, folder: Path) -> None:
    """Make a saved student what its teacher was to sentence-transformers; nothing where it was nothing."""
    modules = sentence_modules(name)
    if not modules or name is None:
        return
    (folder / MODULES).write_text(json.dumps(modules, indent=2))
    for file in BESIDE:
        if (content := _read_json(name, file)) is not None:
            (folder / file).write_text(json.dumps(content, indent=2))
    for path in filter(None, (module["path"] for module in modules)):
        if Path(name).is_dir():
            copytree(Path(name) / path, folder / path, dirs_exist_ok=True)
        elif (content := _read_json(name, f"{path}/config.json")) is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(content, indent=2))


def backbone(model: nn.Module) -> nn.Module:
    """Return the part of a model that computes hidden states, without its head and within adapters."""
    unwrap: Any = getattr(model, "get_base_model", None)
    whole: Any = model if unwrap is None else unwrap()
    inner: nn.Module = whole.base_model
    return inner


def hidden_states(model: nn.Module, input_ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the hidden states ``[B, T, D]`` that each layer of an encoder writes, the last as its head reads it.

    ``input_ids [B, T]`` are int64; ``mask [B, T]`` bool is True where a token is real.
    """
    found = backbone(model)(input_ids=input_ids, attention_mask=mask.long(), output_hidden_states=True)
    return [*found.hidden_states[1:-1], found.last_hidden_state]


@torch.no_grad()
def embed(model: nn.Module, input_ids: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return embeddings ``[B, D]``, fp32; arguments as in :func:`hidden_states`."""
    found = backbone(model)(input_ids=input_ids, attention_mask=mask.long())
    return pooling(found.last_hidden_state.float(), mask)


class Frame(NamedTuple):
    """The special tokens that a tokenizer puts around a text."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Frame":
        """Return those of a tokenizer."""
        whole, text = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
        starts = [n for n in range(len(whole) - len(text) + 1) if whole[n : n + len(text)] == text]
        first = starts[0] if starts else 0
        return cls(tuple(whole[:first]), tuple(whole[first + len(text) :]))

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return a text's tokens with them."""
        return [*self.begin, *ids, *self.end]


def is_encoder(model: PreTrainedModel) -> bool:
    """Tell whether no self-attention of a model is causal."""
    modules = [module for module in model.modules() if hasattr(module, "is_causal")]
    return bool(modules) and not any(module.is_causal for module in modules)
