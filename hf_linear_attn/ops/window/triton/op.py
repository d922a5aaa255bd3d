"""Attention over a window in Triton, as torch.library ops with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import operator, refuse_functional, refuse_transforms
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import as_bytes, codes_of, codes_with, contiguous, directly, execute, target_for
from hf_linear_attn.ops.window import OwnKey
from hf_linear_attn.ops.window.problem import WindowCall
from hf_linear_attn.ops.window.triton.backward import (
    WindowBackward,
    WindowWanted,
    allocate_window_backward,
    window_backward_launches,
)
from hf_linear_attn.ops.window.triton.forward import WindowForward, allocate_window, window_launches
from hf_linear_attn.ops.window.triton.problem import Kept, WindowProblem, held_by_block

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? codes, Tensor? sink_k, Tensor? sink_v, Tensor? seen, Tensor? f, "
    "Tensor? number, Tensor? before, Tensor? bias, Tensor? weight, Tensor? given, Tensor? kept_k, Tensor? kept_v, "
    "Tensor? kept_slot, Tensor? kept_begins, Tensor? kept_ends, Tensor? kept_held, SymInt window, float scaling"
)
"""What both operators take; see :class:`WindowProblem`."""


def window_attention_triton(call: WindowCall, own_key: OwnKey | None) -> Tensor:
    """Compute attention over a window with Triton kernels, which score own keys themselves where no key is kept."""
    q, k, v, key_mask, sinks, _, kept, window, scaling = call
    codes = None if key_mask is None else codes_of(key_mask)
    of_queries: tuple[Tensor | None, ...] = (None,) * 6
    if own_key is not None and own_key.gone is not None:
        score = own_key.score(q, k, window, scaling).masked_fill(own_key.number[:, None] == 0, -torch.inf)
        of_queries = own_key.value, None, None, None, None, score
    elif own_key is not None:
        codes = codes_with(key_mask, own_key.counts)
        of_queries = own_key.value, own_key.number, own_key.before, own_key.bias, own_key.weight, None
    beyond: tuple[Tensor | None, ...] = (None,) * 6 if kept is None else (*kept, held_by_block(kept))
    sink_k, sink_v, seen = (None, None, None) if sinks is None else sinks
    refuse_functional("triton", q, k, v, sink_k, sink_v, *of_queries, *beyond[:2])
    o: Tensor = attend(q, k, v, codes, sink_k, sink_v, seen, *of_queries, *beyond, window, scaling)[0]
    return o


def _window_problem(*inputs: Any) -> WindowProblem:
    q, k, v, codes, sink_k, sink_v, seen, f, number, before, bias, weight, given = inputs[:13]
    beyond, (window, scaling) = inputs[13:19], inputs[19:]
    tokens, f = (readable(q), readable(k), readable(v)), None if f is None else readable(f)
    sinks = contiguous(codes), contiguous(sink_k), contiguous(sink_v), as_bytes(seen)
    own = f, contiguous(number), contiguous(before), contiguous(bias), contiguous(weight), contiguous(given)
    kept = None if beyond[0] is None else Kept(*(x.contiguous() for x in beyond))
    return WindowProblem(target_for(q.device), *tokens, *sinks, *own, kept, window, scaling)


def _forward(*inputs: Any) -> WindowForward:
    """Return o, the log-sum-exp of all scores, those of own keys, and the sums of keys before tiles."""
    return execute(window_launches, _window_problem(*inputs))


triton_window = operator(
    "triton_window",
    _forward,
    lambda *inputs: allocate_window(_window_problem(*inputs)),
    schema=f"({INPUTS}) -> ({', '.join(['Tensor'] * 4)})",
)


def _gradients(do: Tensor, *inputs: Any) -> WindowBackward:
    saved, (problem, wanted) = WindowForward(*inputs[:4]), _derived(*inputs)
    return execute(window_backward_launches, problem, saved, readable(do), wanted)


def _derived(*inputs: Any) -> tuple[WindowProblem, WindowWanted]:
    """Return what the backward is of, and what it is asked for."""
    return _window_problem(*inputs[4:-4]), WindowWanted(*inputs[-4:])


triton_window_backward = operator(
    "triton_window_backward",
    _gradients,
    lambda do, *inputs: allocate_window_backward(*_derived(*inputs)),
    schema=f"(Tensor do, Tensor o, Tensor lse, Tensor score, Tensor prefix, {INPUTS}, bool of_q, bool of_kv, "
    f"bool of_sinks, bool of_kept) -> ({', '.join(['Tensor'] * 11)})",
)


def _save_window(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.window, ctx.scaling = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def backward(ctx: Any, do: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what :func:`attend` takes."""
    if do is None:
        return (None,) * 21
    of_q, of_k, of_v, _, of_sink_k, of_sink_v, _, of_f, _, *of_own, of_given, of_kept_k, of_kept_v = (
        ctx.needs_input_grad[:15]
    )
    of_before, of_bias, of_weight = of_own
    # Read once: where activations are recomputed, torch gives them out no second time.
    saved = ctx.saved_tensors
    _, k, _, _, sink_k, sink_v, _, _, _, _, bias, weight, *_ = saved[4:]
    wanted = WindowWanted(of_q, of_k or of_v or of_before, of_sink_k or of_sink_v, of_kept_k or of_kept_v)
    found = _derive(do, *saved, ctx.window, ctx.scaling, *wanted)
    dq, dk, dv, df, dscore, dweight, dbefore, dsink_k, dsink_v, *dkept = found
    sinks = (
        of_sinks(dx, k.shape[1], x.dtype) if asked else None
        for x, dx, asked in ((sink_k, dsink_k, of_sink_k), (sink_v, dsink_v, of_sink_v))
    )
    db = of_heads(dscore, bias.dtype) if of_bias else None
    dw = of_heads(dweight, weight.dtype) if of_weight else None
    own = df if of_f else None, None, dbefore if of_before else None, db, dw, dscore if of_given else None
    asked = (x if wants else None for x, wants in ((dq, of_q), (dk, of_k), (dv, of_v)))
    kept = (x if wants else None for x, wants in zip(dkept, (of_kept_k, of_kept_v), strict=True))
    return *asked, None, *sinks, None, *own, *kept, *(None,) * 6


def of_sinks(dx: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Sum a gradient of sinks over tiles of queries, and over the query heads that share a key head, in this order."""
    return torch.unflatten(dx, 1, (kv_heads, -1)).sum((2, 3)).to(dtype)


def of_heads(dx: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum a gradient of what each head has learned over a batch and over tokens, or tiles of them."""
    return dx.sum((0, 2)).to(dtype)


torch.library.register_autograd(triton_window, backward, setup_context=_save_window)
attend = directly(triton_window, _forward, _save_window, backward)
_derive = directly(triton_window_backward, _gradients)
refuse_transforms("triton", triton_window, backward=triton_window_backward)
