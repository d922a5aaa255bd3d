"""A layer with a window as one node of autograd's graph: features, linear branch and window, and their gradients.

It runs what :func:`hf_linear_attn.ops.features.features_of`, :func:`hf_linear_attn.ops.linear_attention` and
:func:`hf_linear_attn.ops.window.window_attention` run one after the other. As one node it costs the host less, for
which a GPU waits at a few thousand tokens: autograd is entered once in place of four times, nothing is checked in
between, and gradients are added up where they lie.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.features.triton import op as features
from hf_linear_attn.ops.hybrid.records import Prefill
from hf_linear_attn.ops.library import refuse_functional
from hf_linear_attn.ops.linear_attention.triton import op as linear
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.triton.run import codes_with
from hf_linear_attn.ops.window.triton import op as window


class Settings(NamedTuple):
    """What the operations are told beside tensors.

    Attributes:
        of_q: What the features of queries are told, as their op takes it.
        of_k: The same of keys.
        delay: Tokens by which keys lag in the linear branch.
        eps: Added to its normaliser.
        window: W.
        scaling: Factor on ``q.k``.
        sinks: How many of the first keys are sinks, where those are no tensors of their own.
    """

    of_q: tuple[Any, ...]
    of_k: tuple[Any, ...]
    delay: int
    eps: float
    window: int
    scaling: float
    sinks: int


class Inputs(NamedTuple):
    """The tensors of a layer, as of :class:`Prefill` but for those of a state, or which of them have gradients."""

    q: Any
    k: Any
    v: Any
    codes: Any
    sink_k: Any
    sink_v: Any
    seen: Any
    number: Any
    counts: Any
    turns_q: Any
    turns_k: Any
    weight_q: Any
    power_q: Any
    weight_k: Any
    power_k: Any
    bias: Any
    weight: Any


class Node:
    """What autograd hands the backward of an operation, for one that is a part of another.

    Attributes:
        saved_tensors: What its forward left.
        needs_input_grad: Which of its inputs have gradients.
    """

    def __init__(self, saved: tuple[Any, ...], needs: tuple[Any, ...], **settings: Any) -> None:
        self.saved_tensors, self.needs_input_grad = saved, needs
        self.__dict__.update(settings)


def train_triton(call: Prefill, of_k: Pair, rotation: Rotation | None, first: bool) -> Tensor:
    """Attend with Triton kernels, and with gradients; see :func:`hf_linear_attn.ops.hybrid.hybrid_train`."""
    codes = counts = None
    if call.counts is not None:
        codes, counts = codes_with(call.key_mask, call.counts), call.counts[:, : call.q.shape[2]]
    layout = call.pairs, call.at_end
    settings = Settings(
        of_q=(call.phi, call.factor, call.sharpness, *layout),
        of_k=(of_k.name, of_k.factor, of_k.sharpness, *layout),
        delay=call.q.shape[2] - max(call.k.shape[2] - call.window, 0),
        eps=call.eps,
        window=call.window,
        scaling=call.scaling,
        sinks=call.sink_k.shape[2] if first and call.sink_k is not None else 0,
    )
    sinks = (None, None) if settings.sinks else (call.sink_k, call.sink_v)
    tokens = call.q, call.k, call.v, codes, *sinks, call.seen, call.number, counts
    turns = call.turns, None if rotation is None else rotation.turns
    learned = call.weight_q, call.power_q, of_k.weight, of_k.power, call.bias, call.weight
    refuse_functional("triton", *tokens, *learned)
    o: Tensor = _Layer.apply(settings, *tokens, *turns, *learned)  # type: ignore[no-untyped-call]
    return o


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: Any) -> Tensor:
        x = Inputs(*tensors)
        own_k = x.k[:, :, : x.q.shape[2]]
        phi_q = features.compute(x.q, x.turns_q, x.weight_q, x.power_q, *settings.of_q)
        phi_k = features.compute(own_k, x.turns_k, x.weight_k, x.power_k, *settings.of_k)
        far, den, _, _ = linear.attend(*_linear(x, phi_q, phi_k), "identity", True, settings.delay, settings.eps)
        found = window.attend(*_window(x, far, settings.sinks), settings.window, settings.scaling)
        ctx.settings = settings
        ctx.save_for_backward(*tensors, *found, far, den, phi_q, phi_k)
        return found[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        # Read once: where activations are recomputed, torch gives them out no second time.
        saved, settings, number = ctx.saved_tensors, ctx.settings, len(Inputs._fields)
        x, (*found, far, den, phi_q, phi_k) = Inputs(*saved[:number]), saved[number:]
        needs, count = Inputs(*ctx.needs_input_grad[1:]), x.q.shape[2]
        of_phi = needs.q or needs.weight_q or needs.power_q, needs.k or needs.weight_k or needs.power_k
        of_sinks = (needs.k, needs.v) if settings.sinks else (needs.sink_k, needs.sink_v)

        of_own = any(of_phi) or needs.v, False, False, needs.bias, needs.weight, False
        asked: tuple[Any, ...] = *needs[:3], False, *of_sinks, False, *of_own, False, False
        told = {"window": settings.window, "scaling": settings.scaling}
        node = Node((*found, *_window(x, far, settings.sinks)), asked, **told)
        dq, dk, dv, _, dsink_k, dsink_v, _, dfar, _, _, dbias, dweight, *_ = window.backward(node, do)

        told = {"phi": "identity", "causal": True, "delay": settings.delay, "eps": settings.eps}
        asked = *of_phi, needs.v, *(False,) * 5
        node = Node((far, den, None, None, *_linear(x, phi_q, phi_k)), asked, **told)
        dphi_q, dphi_k, dv_far, *_ = linear.backward(node, dfar, None, None, None)

        asked = needs.q, False, needs.weight_q, needs.power_q
        node = Node((x.q, x.turns_q, x.weight_q, x.power_q), asked, settings=settings.of_q)
        dq_far, of_q = _of_map(node, dphi_q)
        asked = needs.k, False, needs.weight_k, needs.power_k
        node = Node((x.k[:, :, :count], x.turns_k, x.weight_k, x.power_k), asked, settings=settings.of_k)
        dk_far, of_k = _of_map(node, dphi_k)
        for whole, part in ((dq, dq_far), (dk, dk_far), (dv, dv_far)):
            if whole is not None and part is not None:
                whole[:, :, :count].add_(part)
        if settings.sinks:
            for whole, part in ((dk, dsink_k), (dv, dsink_v)):
                if whole is not None and part is not None:
                    whole[:, :, : settings.sinks].add_(part)
            dsink_k = dsink_v = None
        return None, dq, dk, dv, None, dsink_k, dsink_v, *(None,) * 5, *of_q, *of_k, dbias, dweight


def _of_map(node: Node, dphi: Tensor | None) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Return the gradient of queries or keys, and those of what their map has learned."""
    if dphi is None:
        return None, (None, None)
    dx, _, *of_map = features.backward(node, dphi)[:4]
    return dx, tuple(of_map)


def _linear(x: Inputs, phi_q: Tensor, phi_k: Tensor) -> tuple[Any, ...]:
    """Return the tensors of the linear branch, as its op takes them."""
    return phi_q, phi_k, x.v[:, :, : x.q.shape[2]], x.counts, None, None, None, None


def _window(x: Inputs, far: Tensor, sinks: int) -> tuple[Any, ...]:
    """Return those of the window."""
    of_sinks = (x.k[:, :, :sinks], x.v[:, :, :sinks]) if sinks else (x.sink_k, x.sink_v)
    return x.q, x.k, x.v, x.codes, *of_sinks, x.seen, far, x.number, None, x.bias, x.weight, *(None,) * 7
