"""Running a model with its texts split over ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.parallel.layout import Part, lay_out
from hf_linear_attn.parallel.ranks import Processes, Ranks
from hf_linear_attn.parallel.shard import Shard, Waiting
from hf_linear_attn.patching.call_cache import cache_of
from hf_linear_attn.patching.discover import attends_causally, attention_layers
from hf_linear_attn.patching.scope import part_of

IGNORED = -100
"""A label that no loss counts."""

HANDED_ON = ("additive", "decay", "delta", "gated_delta")
"""The update rules whose states ranks can hand on."""

SPLIT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")
"""What a batch may hold that has a token per column."""

_active: "WeakKeyDictionary[nn.Module, ContextParallel]" = WeakKeyDictionary()
"""The models that read parts of texts."""


class ContextParallel:
    """A model whose forward reads one rank's part of the texts.

    Args:
        model: A patched causal language model.
        ranks: The ranks.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.parts = _parts(model)
        self._paused = False

    @property
    def rank(self) -> int:
        """This rank's number: rank 0 has the beginning of every text."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    def lengths(self, tokens: int) -> list[int]:
        """Return how many of a text's tokens each rank takes: as many, but for one more on the first few.

        Raises:
            ArgumentError: If there are fewer tokens than ranks.
        """
        if tokens < self.size:
            raise ArgumentError(
                "input_ids", f"have a token for each of {self.size} ranks", tokens, "Use fewer ranks for short texts."
            )
        return [tokens // self.size + (rank < tokens % self.size) for rank in range(self.size)]

    def split(self, batch: Mapping[str, Any], lengths: Sequence[int] | None = None) -> dict[str, Any]:
        """Return this rank's part of a batch that every rank has whole.

        Positions are those of the whole text, and labels are shifted before the split: a rank's last token is followed
        by the next rank's first. With the number of labels beside them, the losses of all ranks add up to that of one
        process.

        Args:
            batch: ``input_ids [B, T]`` or ``inputs_embeds``, and what else the model is called with among
                ``attention_mask [B, T]``, ``position_ids [B, T]`` and ``labels [B, T]``; what has no tokens is passed
                on.
            lengths: Tokens of each rank; None for as many on each.

        Returns:
            The same, ``[B, T_rank]``, with ``position_ids``; in place of labels ``labels``, ``shift_labels`` and
            ``num_items_in_batch``, as Transformers' losses take them.

        Raises:
            ArgumentError: If shapes do not fit, or the lengths do not add up.
        """
        first = batch.get("input_ids", batch.get("inputs_embeds"))
        if first is None:
            raise ArgumentError("batch", "hold input_ids", sorted(batch), "Pass what the model is called with.")
        rows, tokens = first.shape[:2]
        if "shift_labels" in batch:
            raise ArgumentError("batch", "hold labels as they are", "shift_labels", "split() shifts them.")
        lengths = self.lengths(tokens) if lengths is None else list(lengths)
        if len(lengths) != self.size or sum(lengths) != tokens or min(lengths) < 1:
            raise ArgumentError(
                "lengths", f"be {self.size} whole numbers >= 1 of sum {tokens}", lengths, "Leave it out for even parts."
            )
        whole = {name: x for name, x in batch.items() if x is not None}
        for name in whole.keys() & set(SPLIT):
            if whole[name].ndim < 2 or whole[name].shape[1] != tokens:
                raise ArgumentError(
                    name, f"have {tokens} tokens, [B, T]", tuple(whole[name].shape), "Pass it for the whole text."
                )
        if "position_ids" not in whole:
            whole["position_ids"] = torch.arange(tokens, device=first.device).expand(rows, -1)
        labels = whole.pop("labels", None)
        if labels is not None:
            whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        start = [0, *accumulate(lengths)][self.rank]
        own = slice(start, start + lengths[self.rank])
        part = {name: x[:, own].contiguous() if name in SPLIT else x for name, x in whole.items()}
        if labels is not None:
            part["labels"] = part["shift_labels"]
            part.setdefault("num_items_in_batch", (whole["shift_labels"] != IGNORED).sum())
        return part

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Add up the ranks' gradients: each has those of its own tokens' losses.

        Args:
            parameters: Whose; None for the model's. Those of one dtype travel together.
        """
        ranks = self.ranks
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in self.model.parameters() if parameters is None else parameters:
            if p.requires_grad:
                by_dtype.setdefault(p.dtype, []).append(p)
        for group in by_dtype.values():
            for p in group:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads = [p.grad for p in group if p.grad is not None]
            flat = ranks.sum(torch.cat([x.flatten() for x in grads]))
            pieces = torch.split(flat, [x.numel() for x in grads])
            for x, piece in zip(grads, pieces, strict=True):
                x.copy_(piece.view_as(x))

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's ``x``, without gradient."""
        return self.ranks.sum(x)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let the model read whole texts again within a ``with`` block."""
        shards = [part.shard for part in self.parts]
        self._paused = True
        for part in self.parts:
            part.shard = None
        try:
            yield
        finally:
            self._paused = False
            for part, shard in zip(self.parts, shards, strict=True):
                part.shard = shard

    @contextmanager
    def active(self) -> Iterator["ContextParallel"]:
        """Let the model read parts within a ``with`` block."""
        if any(part.shard is not None for part in self.parts):
            raise ArgumentError("model", "not be split already", type(self.model).__name__, "Leave the outer block.")
        handle = self.model.register_forward_pre_hook(self._enter, with_kwargs=True)
        for part in self.parts:
            part.shard = Waiting()
        _active[self.model] = self
        try:
            yield self
        finally:
            del _active[self.model]
            handle.remove()
            for part in self.parts:
                part.shard = None

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lay the ranks' parts out before a forward."""
        if self._paused:
            return args, kwargs
        where = type(module).__name__
        if len(args) > 1:
            raise ArgumentError("args", "be input_ids alone", len(args), "Name the other arguments.", where=where)
        first = args[0] if args else kwargs.get("input_ids")
        first = kwargs.get("inputs_embeds") if first is None else first
        if not isinstance(first, Tensor):
            raise ArgumentError("input_ids", "be given", None, "Pass the part that split() returns.", where=where)
        self._refuse(kwargs, where)
        rows, tokens = first.shape[:2]
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None:
            remedy = "A rank does not know where its part begins: pass what split() returns."
            raise ArgumentError("position_ids", "be those of the whole text", None, remedy, where=where)
        if positions.ndim != 2 or positions.shape[1] != tokens:
            remedy = "Texts have one position a token."
            raise UnsupportedError("position_ids", f"be [B, {tokens}]", tuple(positions.shape), remedy, where=where)
        labels, unshifted = kwargs.get("shift_labels"), None
        if labels is not None and first.ndim == 2:
            unshifted = _unshifted(first, labels)
        part = Part(positions.expand(rows, -1), None if mask is None else mask.bool(), unshifted)
        shards: dict[tuple[int, int], Shard] = {}
        for layer in self.parts:
            sight = layer.settings.window or 0, layer.settings.sinks
            if sight not in shards:
                shards[sight] = Shard(self.ranks, lay_out(self.ranks, part, *sight))
            layer.shard = shards[sight]
        return args, kwargs

    def _refuse(self, kwargs: Mapping[str, Any], where: str) -> None:
        """Refuse what cannot be split, or is not."""
        mask, cache = kwargs.get("attention_mask"), cache_of(kwargs)
        if mask is not None and mask.ndim != 2:
            raise UnsupportedError(
                "attention_mask", "be a padding mask [B, T]", tuple(mask.shape), "Pack by position_ids.", where=where
            )
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            rule = "come shifted before the split, as shift_labels beside them"
            remedy = "A rank's last token is followed by the next rank's first: pass what split() returns."
            raise ArgumentError("labels", rule, tuple(kwargs["labels"].shape), remedy, where=where)
        if cache is not None and int(cache.get_seq_length()) > 0:
            raise UnsupportedError(
                "cache",
                "be empty where a text is split over ranks",
                f"a cache of {int(cache.get_seq_length())} tokens",
                "Leave the block to go on from it, on the last rank.",
                where=where,
            )
        if kwargs.get("cu_seq_lens_q") is not None:
            raise UnsupportedError(
                "cu_seq_lens_q",
                "be left out where a text is split over ranks",
                f"boundaries of {len(kwargs['cu_seq_lens_q']) - 1} documents",
                "position_ids that begin anew say as much, on whichever rank.",
                where=where,
            )


def _unshifted(ids: Tensor, labels: Tensor) -> Tensor:
    """Tell whether labels are those of the tokens themselves, and not also those of the next ones."""
    counted = labels[:, :-1] != IGNORED
    own = (labels == ids) | (labels == IGNORED)
    return own.all() & (counted & (labels[:, :-1] != ids[:, 1:])).any()


def _parts(model: nn.Module) -> list[LinearAttention]:
    """Return the converted layers of a model that can be split; raise by name what cannot be."""
    name = type(model).__name__
    parts = [part for module in model.modules() if (part := part_of(module)) is not None]
    if not parts:
        raise ArgumentError("model", "be patched", name, "Call patch_model(model) first.")
    for part in parts:
        if part.settings.update_rule not in HANDED_ON:
            rule = f"be one of {', '.join(HANDED_ON)} where texts are split over ranks"
            remedy = "Of others it is not known how a rank's keys pass a state on: run whole texts."
            raise UnsupportedError("update_rule", rule, part.settings.update_rule, remedy, where=part.name)
    for layer in attention_layers(model):
        if part_of(layer.module) is None:
            rule = "be all of them where texts are split over ranks"
            remedy = "Softmax needs every earlier key: convert the layer too, or run whole texts."
            raise UnsupportedError("layers", rule, f"softmax in {layer.name}", remedy, where=name)
        if not attends_causally(layer.module):
            rule = "attend causally where texts are split over ranks"
            raise UnsupportedError("model", rule, "attention in both directions", "Run whole texts.", where=layer.name)
    config: Any = getattr(model, "config", None)
    types = set(getattr(config.get_text_config(), "layer_types", None) or ()) if config is not None else set()
    other = sorted(kind for kind in types if "attention" not in kind or kind == "linear_attention")
    if other or getattr(model, "_is_stateful", False):
        rule = "have attention alone to mix tokens"
        remedy = "What other layers remember is not handed from rank to rank: run whole texts."
        raise UnsupportedError("model", rule, other or "a recurrent state", remedy, where=name)
    return parts


def whole_texts(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a model that reads parts of texts reads whole ones, and any other is left alone."""
    context = _active.get(model)
    return nullcontext() if context is None else context.whole()


@contextmanager
def context_parallel(
    model: nn.Module, group: ProcessGroup | DeviceMesh | Ranks | None = None
) -> Iterator[ContextParallel]:
    """Run a converted model with its texts split over ranks, within a ``with`` block.

    Each rank calls the model with its own consecutive part of the same rows; forward, backward and a prefill give what
    one process gives. After a prefill the last rank's cache is the whole one. Layers exchange states, which do not grow
    with the text. Gradients are each rank's own: :meth:`ContextParallel.sum_gradients` adds them up.

    Args:
        model: A causal language model, all of whose attention layers are converted.
        group: A process group, or a mesh of one dimension such as Accelerate's ``mesh["cp"]``; None for all processes.

    Yields:
        What splits batches and adds up gradients.

    Raises:
        ArgumentError: If there is no such group, or the model is not patched; in a forward, on all ranks alike, if
            parts do not belong together.
        UnsupportedError: If something in the model cannot be split, by its name.
        TrainingError: In a forward or backward, if another rank is gone; its number is named.

    Example:
        A batch that every rank has whole, and one step::

            with context_parallel(model) as context:
                part = context.split({"input_ids": ids, "labels": ids})
                model(**part, use_cache=False).loss.backward()
                context.sum_gradients()
    """
    ranks = group if isinstance(group, Ranks) else Processes(group)
    try:
        with ContextParallel(model, ranks).active() as context:
            yield context
    finally:
        if ranks is not group:
            ranks.close()
