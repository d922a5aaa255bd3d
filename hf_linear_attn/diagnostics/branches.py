"""What each branch of a patched model contributes: window, sinks, kept keys, and linear attention."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers import Branch, Call
from hf_linear_attn.layers.call import Piece
from hf_linear_attn.layers.kept import Beyond
from hf_linear_attn.layers.rules import Gates
from hf_linear_attn.patching import LinearAttention, disable_branch, is_patched

PROBES = 8
"""Random values by which a token's mixture is read off; two would do, more make it well conditioned."""


@torch.no_grad()
def branch_usage(model: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
    """Measure the share of each branch in a patched model's attention, and the loss with each switched off.

    Every output is ``(1 - g) (window, sinks and kept keys) + g linear``, both normalised, whatever the rule by which
    they are joined. Attention is linear in v where gates and the choice of kept keys stay what they are, so feeding
    random v through a layer with branches switched off tells g, feeding indicators of the first tokens tells the weight
    of the sinks, and feeding ones to the kept keys alone tells theirs.

    Args:
        model: A patched causal language model.
        input_ids: One sequence ``[1, T]``, T >= 2.

    Returns:
        ``layers`` with ``name``, and ``window``, ``sinks``, ``kept`` where keys are, and ``linear``: shares per head,
        mean over tokens, that sum to 1; where keys are kept ``kept_at``, the numbers of those that each key head has
        left at the end, by layer; ``loss_nats``, and where layers have a window ``loss_nats_without`` each
        branch, and the same over the tokens beyond window and sinks only, ``loss_nats_beyond`` and
        ``loss_nats_beyond_without``.

    Raises:
        ArgumentError: If the model is not patched, or ``input_ids`` has another shape.
    """
    if not is_patched(model):
        raise ArgumentError("model", "be patched", type(model).__name__, "Call patch_model, or pass maps to compare.")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
        raise ArgumentError("input_ids", "be one sequence [1, T], T >= 2", tuple(input_ids.shape), "Pass one text.")
    modules = {name: m for name, m in model.named_modules() if isinstance(m, LinearAttention)}
    layers: list[dict[str, Any]] = []
    kept_at: dict[str, list[list[int]]] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        shares, chosen = _shares(module, *args)  # type: ignore[arg-type]
        layers.append({"name": module.name, **shares})
        if chosen is not None:
            kept_at[str(module.name)] = chosen.kept_at()[0]

    with ExitStack() as hooks:
        for module in modules.values():
            hooks.enter_context(module.register_forward_hook(watch))
        losses = _losses(model, input_ids)
    report: dict[str, Any] = {"tokens": input_ids.shape[1], "layers": layers, "loss_nats": losses.mean().item()}
    if kept_at:
        report["kept_at"] = kept_at
    windows = [m.settings.window + m.settings.sinks for m in modules.values() if m.settings.window is not None]
    if windows:
        beyond = losses[max(windows) :]
        report["loss_nats_beyond"] = beyond.mean().item() if len(beyond) else None
        report["loss_nats_without"], report["loss_nats_beyond_without"] = {}, {}
        for branch in get_args(Branch):
            if branch == "kept" and not any(m.settings.kept for m in modules.values()):
                continue
            with disable_branch(model, branch):
                losses = _losses(model, input_ids)
            beyond = losses[max(windows) :]
            report["loss_nats_without"][branch] = losses.mean().item()
            report["loss_nats_beyond_without"][branch] = beyond.mean().item() if len(beyond) else None
    return report


def _losses(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits[0, :-1]
    return nn.functional.cross_entropy(logits.float(), input_ids[0, 1:], reduction="none")


def _shares(
    module: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[dict[str, list[float]], Beyond | None]:
    """Return the shares by branch, and what is kept beyond the window."""
    heads = module.sizes.num_heads
    window, sinks = module.settings.window, module.settings.sinks
    zeros, ones = [0.0] * heads, [1.0] * heads
    if window is None:
        return {"window": zeros, "sinks": zeros, "linear": ones}, None
    call = call if module.undoes else call._replace(rotation=None)
    real = module.split(q, k, v, call)
    chosen, gates = real.beyond, _gates_of(module, real)

    def attend(values: Tensor, *, kept_alone: bool = False) -> Tensor:
        piece = _with_values(real, values)
        if kept_alone and piece.tokens is not None and piece.beyond is not None:
            nothing = _with_values(real, torch.zeros_like(values)).tokens
            ones_kept = piece.beyond._replace(v=torch.ones_like(piece.beyond.v))
            piece = piece._replace(tokens=nothing, beyond=ones_kept)
        with _gated(module, lambda k, v: gates):
            return module.read(piece, None)[0].float()

    tokens = q.shape[2]
    generator = torch.Generator(device="cpu").manual_seed(0)
    probes = torch.randn(1, 1, tokens, PROBES, generator=generator, device="cpu").to(q.device)
    indicators = torch.eye(tokens, device=q.device)[None, None, :, :sinks]
    values = torch.cat([probes, indicators], dim=-1).expand(*k.shape[:2], -1, -1).to(v.dtype)
    with torch.autocast(q.device.type, enabled=False):
        whole, on_kept = attend(values), torch.zeros((), device=q.device)
        with disable_branch(module, "linear"):
            near = attend(values)
            if chosen is not None:
                on_kept = attend(values, kept_alone=True)[..., 0]
        with disable_branch(module, "window"):
            far = attend(values)
    step = (far - near)[..., :PROBES]
    moved = (whole - near)[..., :PROBES]
    share = (moved * step).sum(-1) / step.square().sum(-1).clamp(min=1e-20)
    # A sink within the window belongs to the window.
    distance = torch.arange(tokens, device=q.device)[:, None] - torch.arange(near.shape[-1] - PROBES, device=q.device)
    on_sinks = (near[..., PROBES:] * (distance >= window)).sum(-1) * (1 - share)
    on_kept = (on_kept * (1 - share)).expand(share.shape)
    linear, sink, kept = (x.mean((0, 2)) for x in (share, on_sinks, on_kept))
    shares = {"window": 1 - linear - sink - kept, "sinks": sink, "kept": kept, "linear": linear}
    return {name: x.tolist() for name, x in shares.items() if name != "kept" or chosen is not None}, chosen


def _with_values(piece: Piece, values: Tensor) -> Piece:
    """Put other values into a text's piece, and leave what was chosen by its own as it is.

    Args:
        piece: What a layer reads of one text without padding.
        values: ``[1, HKV, T, *]``.
    """
    tokens, beyond = piece.tokens, piece.beyond
    if tokens is None:
        return piece._replace(v=values)

    def at(places: Tensor) -> Tensor:
        index = places.clamp(max=values.shape[2] - 1)[..., None]
        return values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))

    # A sink that has not come is seen by none.
    sinks = None if tokens.sink_place is None else at(tokens.sink_place[:, None])
    if beyond is not None:
        beyond = beyond._replace(v=at(beyond.positions))
    return piece._replace(v=values, tokens=tokens._replace(v=values, sink_v=sinks), beyond=beyond)


def _gates_of(module: LinearAttention, piece: Piece) -> Gates | None:
    """Return the gates of a text's keys, which are made of their values, too."""
    found: list[Gates | None] = []
    gates = module.gates

    def note(k: Tensor, v: Tensor) -> Gates | None:
        found.append(gates(k, v))
        return found[-1]

    with _gated(module, note):
        module.read(piece, None)
    return found[0] if found else None


@contextmanager
def _gated(module: LinearAttention, gates: Callable[[Tensor, Tensor], Gates | None]) -> Iterator[None]:
    """Let a layer take its gates from a function, within the block."""
    module.gates = gates  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del module.gates
