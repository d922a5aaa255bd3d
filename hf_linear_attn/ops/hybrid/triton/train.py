"""A layer with a window as one op, and its gradients as another: features, linear branch and window.

It launches what :func:`hf_linear_attn.ops.features.features_of`, :func:`hf_linear_attn.ops.linear_attention` and
:func:`hf_linear_attn.ops.window.window_attention` launch one after the other. As one op with one plan it costs the host
less, for which a GPU waits at a few thousand tokens, and gradients of queries, keys and values are added up by the
kernels that compute them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.features.triton.kernels import (
    FeatureGradients,
    FeatureProblem,
    allocate_features,
    features_backward_launch,
    features_launch,
)
from hf_linear_attn.ops.features.triton.op import finish
from hf_linear_attn.ops.hybrid.records import Prefill
from hf_linear_attn.ops.hybrid.triton.prefill import Left, read_launches
from hf_linear_attn.ops.hybrid.triton.queries import queries_backward_launches
from hf_linear_attn.ops.library import operator, refuse_functional, refuse_transforms
from hf_linear_attn.ops.linear_attention.triton.backward import Saved, Wanted, backward_launches
from hf_linear_attn.ops.linear_attention.triton.forward import allocate_state, forward_launches
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Problem, Target, readable
from hf_linear_attn.ops.triton.run import as_bytes, codes_with, contiguous, directly, execute, target_for
from hf_linear_attn.ops.window.triton.backward import Far, WindowWanted, window_backward_launches
from hf_linear_attn.ops.window.triton.forward import WindowForward, allocate_window, sum_launches, window_launches
from hf_linear_attn.ops.window.triton.op import of_heads, of_sinks
from hf_linear_attn.ops.window.triton.problem import WindowProblem

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? codes, Tensor? counts, Tensor? sink_k, Tensor? sink_v, Tensor? seen, "
    "Tensor number, Tensor? turns_q, Tensor? turns_k, Tensor weight_q, Tensor? power_q, Tensor weight_k, "
    "Tensor? power_k, Tensor bias, Tensor weight"
)
SETTINGS = (
    "str map_q, float factor_q, float sharpness_q, str map_k, float factor_k, float sharpness_k, str pairs, "
    "bool at_end, SymInt delay, float eps, SymInt window, float scaling, SymInt sinks"
)
"""What both operators take; see :class:`Train`."""


class Train(NamedTuple):
    """One call of the op: tensors as of :class:`Prefill`, and settings.

    Attributes:
        codes: Masks ``[B, P + T]`` as of :class:`WindowProblem`; None where all keys are real and count.
        counts: ``[B, T]`` bool, True = a key that counts in the linear branch; None likewise.
        turns_q: By which queries are turned.
        turns_k: By which the first T keys are.
        power_k: Of the map of keys, as are ``weight_k`` and all that ends alike.
        delay: Tokens by which keys lag in the linear branch.
        sinks: How many of the first keys are sinks, where those are no tensors of their own.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    codes: Tensor | None
    counts: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    seen: Tensor | None
    number: Tensor
    turns_q: Tensor | None
    turns_k: Tensor | None
    weight_q: Tensor
    power_q: Tensor | None
    weight_k: Tensor
    power_k: Tensor | None
    bias: Tensor
    weight: Tensor
    map_q: str
    factor_q: float
    sharpness_q: float
    map_k: str
    factor_k: float
    sharpness_k: float
    pairs: str
    at_end: bool
    delay: int
    eps: float
    window: int
    scaling: float
    sinks: int

    def own(self, x: Tensor) -> Tensor:
        """Return the first T of keys or values: those that the linear branch reads."""
        return x[:, :, : self.q.shape[2]]

    def of_q(self, target: Target) -> FeatureProblem:
        """Return the features of queries as a problem."""
        learned = self.turns_q, self.weight_q, self.power_q
        return FeatureProblem(
            target, self.q, *learned, self.map_q, self.factor_q, self.sharpness_q, self.pairs, self.at_end
        )

    def of_k(self, target: Target) -> FeatureProblem:
        """Return those of keys."""
        learned = self.turns_k, self.weight_k, self.power_k
        return FeatureProblem(
            target, self.own(self.k), *learned, self.map_k, self.factor_k, self.sharpness_k, self.pairs, self.at_end
        )

    def linear(self, target: Target, phi_q: Tensor, phi_k: Tensor) -> Problem:
        """Return the linear branch as a problem."""
        tokens = phi_q, phi_k, self.own(self.v), self.counts
        return Problem(target, *tokens, None, None, None, "identity", True, self.delay)

    def near(self, target: Target, far: Tensor) -> WindowProblem:
        """Return the window as a problem, with what the linear branch reads as the values of own keys."""
        own = far, self.number, None, self.bias, self.weight, None, None
        tokens = self.q, self.k, self.v, self.codes, self.sink_k, self.sink_v, self.seen
        return WindowProblem(target, *tokens, *own, self.window, self.scaling)

    def in_one(self, branch: Problem) -> bool:
        """Whether one kernel computes the queries' features, the linear branch and the window."""
        return self.k.shape[2] > self.window and branch.has("prefill")

    def derives_in_one(self, target: Target, branch: Problem) -> bool:
        """Whether one kernel computes what queries get through the linear branch and their features."""
        return self.of_q(target).in_halves and branch.has("queries_backward")

    def reading(self, phi_k: Tensor) -> Prefill:
        """Return it as that kernel takes it."""
        own = self.sink_k, self.sink_v, self.seen, self.number, None, None, None
        learned = self.turns_q, self.weight_q, self.power_q, self.bias, self.weight
        of_map = self.map_q, self.factor_q, self.sharpness_q, self.pairs, self.at_end
        tokens = self.q, self.k, self.v, phi_k, self.codes, self.counts
        return Prefill(*tokens, *own, *learned, *of_map, self.window, self.scaling, self.eps)

    def laid_out(self) -> "Train":
        """Return it as kernels read it."""
        names = "codes", "sink_k", "sink_v", "number", "turns_q", "turns_k"
        learned = "weight_q", "power_q", "weight_k", "power_k", "bias", "weight"
        plain: dict[str, Any] = {name: contiguous(getattr(self, name)) for name in (*names, *learned)}
        if self.sinks:
            plain |= {f"sink_{name}": getattr(self, name)[:, :, : self.sinks].contiguous() for name in "kv"}
        plain |= {name: readable(getattr(self, name)) for name in "qkv"}
        return self._replace(**plain, counts=as_bytes(self.counts), seen=as_bytes(self.seen))


class Trained(NamedTuple):
    """What the forward leaves behind: of the window as :class:`WindowForward`, and of the linear branch.

    Attributes:
        far: What it reads ``[B, H, T, V]``.
        den: Its guarded normalisers ``[B, H, T]``, fp32.
        phi_q: Features of queries ``[B, H, T, F]``.
        phi_k: Those of the first T keys ``[B, HKV, T, F]``.
    """

    o: Tensor
    lse: Tensor
    score: Tensor
    prefix: Tensor
    far: Tensor
    den: Tensor
    phi_q: Tensor
    phi_k: Tensor


class Asked(NamedTuple):
    """Which gradients are asked for, by the names of what they are of."""

    q: bool
    k: bool
    v: bool
    sink_k: bool
    sink_v: bool
    weight_q: bool
    power_q: bool
    weight_k: bool
    power_k: bool
    bias: bool
    weight: bool


ASKED = ", ".join(f"bool of_{name}" for name in Asked._fields)


class Derived(NamedTuple):
    """What the kernels of the backward write.

    ``dq``, ``dk`` and ``dv`` are whole but for what a library multiplies; ``dphi_k`` is not written where no query sees
    a key. The rest is as of :class:`WindowBackward` and of :class:`FeatureGradients`, by whose it is.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dscore: Tensor
    dweight: Tensor
    dsink_k: Tensor
    dsink_v: Tensor
    dphi_k: Tensor
    of_q: FeatureGradients | None
    of_k: FeatureGradients | None


def train_triton(call: Prefill, of_k: Pair, rotation: Rotation | None, first: bool) -> Tensor:
    """Attend with Triton kernels, and with gradients; see :func:`hf_linear_attn.ops.hybrid.hybrid_train`."""
    codes = counts = None
    if call.counts is not None:
        codes, counts = codes_with(call.key_mask, call.counts), call.counts[:, : call.q.shape[2]]
    sinks = call.sink_k.shape[2] if first and call.sink_k is not None else 0
    of_sinks = (None, None) if sinks else (call.sink_k, call.sink_v)
    tokens = call.q, call.k, call.v, codes, counts, *of_sinks, call.seen, call.number
    turns = call.turns, None if rotation is None else rotation.turns
    learned = call.weight_q, call.power_q, of_k.weight, of_k.power, call.bias, call.weight
    refuse_functional("triton", *tokens, *learned)
    maps = call.phi, call.factor, call.sharpness, of_k.name, of_k.factor, of_k.sharpness, call.pairs, call.at_end
    delay = call.q.shape[2] - max(call.k.shape[2] - call.window, 0)
    o: Tensor = attend(*tokens, *turns, *learned, *maps, delay, call.eps, call.window, call.scaling, sinks)[0]
    return o


def train_launches(target: Target, x: Train) -> tuple[Trained, list[Launch]]:
    """Plan the forward: the results, allocated but not computed, and the launches that compute them, in order."""
    phi_q, of_q = features_launch(x.of_q(target))
    phi_k, of_k = features_launch(x.of_k(target))
    branch = x.linear(target, phi_q, phi_k)
    if x.in_one(branch):
        saved = _results(target, x, phi_q, phi_k)
        sums = sum_launches(x.near(target, saved.far), saved.prefix)
        left = Left(phi_q, saved.far, saved.den, saved.lse, saved.score)
        reading = read_launches(target, x.reading(phi_k), saved.o, allocate_state(branch), saved.prefix, left)
        return saved, [of_k, *sums, *reading]
    far, linear = forward_launches(branch, x.eps)
    found, near = window_launches(x.near(target, far.o))
    return Trained(*found, far.o, far.den, phi_q, phi_k), [of_q, of_k, *linear, *near]


def train_backward_launches(
    target: Target, x: Train, saved: Trained, do: Tensor, asked: Asked
) -> tuple[Derived, list[Launch]]:
    """Plan the backward likewise."""
    of_sinks = asked.sink_k or asked.sink_v or (x.sinks > 0 and (asked.k or asked.v))
    wanted = WindowWanted(asked.q, asked.k or asked.v, of_sinks, False)
    linear = Far(saved.den, torch.empty_like(saved.den), torch.empty_like(saved.den))
    near, launches = window_backward_launches(x.near(target, saved.far), WindowForward(*saved[:4]), do, wanted, linear)
    nothing = near.dscore.new_empty(0)
    found = Derived(*near[:3], near.dscore, near.dweight, near.dsink_k, near.dsink_v, nothing, None, None)
    of_q, of_k = asked.q or asked.weight_q or asked.power_q, asked.k or asked.weight_k or asked.power_k
    if not (of_q or of_k or asked.v):
        return found, launches
    problem = x.linear(target, saved.phi_q, saved.phi_k)
    fused = of_q and x.derives_in_one(target, problem)
    branch = Saved(saved.far, linear.over, None, None)
    wanted_far = Wanted(of_q and not fused, of_k, asked.v, False, False)
    into = x.own(near.dv) if asked.v else None
    far, of_branch = backward_launches(problem, branch, do, None, None, wanted_far, into, linear.delta_f)
    launches += of_branch
    if fused:
        rows, dq = (do, linear.over, linear.delta_f), near.dq if asked.q else None
        of_map, of_queries = queries_backward_launches(problem, x.of_q(target), *rows, dq, asked.weight_q)
        launches, found = [*launches, *of_queries], found._replace(of_q=of_map)
    elif of_q:
        of_map, launch = _of_map(x.of_q(target), far.dq, near.dq if asked.q else None, asked.weight_q)
        launches, found = [*launches, launch], found._replace(of_q=of_map)
    if of_k:
        # Keys that no query sees, because they lag, have no gradients written.
        seen = x.q.shape[2] - x.delay
        of_map, launch = _of_map(x.of_k(target), far.dk, x.own(near.dk) if asked.k else None, asked.weight_k, seen)
        launches, found = [*launches, launch], found._replace(of_k=of_map, dphi_k=far.dk)
    return found, launches


def _of_map(
    p: FeatureProblem, dphi: Tensor, dx: Tensor | None, of_weight: bool, seen: int | None = None
) -> tuple[FeatureGradients, Launch]:
    """Plan the gradients of features; those of their tokens, if asked for, are added to ``dx``."""
    return features_backward_launch(p, dphi, dx is not None, of_weight, dx if p.in_halves else None, seen)


def forward(*inputs: Any) -> Trained:
    """Return o, and what the backward needs."""
    x = Train(*inputs)
    return execute(train_launches, target_for(x.q.device), x.laid_out())


def _results(target: Target, x: Train, phi_q: Tensor, phi_k: Tensor) -> Trained:
    """Allocate what the forward leaves beside features."""
    far = empty_like_tokens(x.q, x.v.shape[3])
    den = torch.empty(x.q.shape[:3], dtype=torch.float32, device=x.q.device)
    return Trained(*allocate_window(x.near(target, far)), far, den, phi_q, phi_k)


def _allocate(*inputs: Any) -> Trained:
    x = Train(*inputs).laid_out()
    target = target_for(x.q.device)
    return _results(target, x, allocate_features(x.of_q(target)), allocate_features(x.of_k(target)))


triton_train = operator(
    "triton_train",
    forward,
    _allocate,
    schema=f"({TENSORS}, {SETTINGS}) -> ({', '.join(['Tensor'] * len(Trained._fields))})",
)


def _parts(inputs: Sequence[Any]) -> tuple[Trained, Train, Asked]:
    """Return what the forward left, what it was given, and what the backward is asked for."""
    left, given = len(Trained._fields), len(Asked._fields)
    return Trained(*inputs[:left]), Train(*inputs[left:-given]), Asked(*inputs[-given:])


def gradients(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients in the order of :class:`Asked`; those that are not asked for are empty."""
    saved, x, asked = _parts(inputs)
    target, x = target_for(do.device), x.laid_out()
    found: Derived = execute(train_backward_launches, target, x, saved, readable(do), asked)
    by_name: dict[str, Tensor | None] = {"q": found.dq, "k": found.dk, "v": found.dv}
    sides = (("q", found.of_q, x.of_q(target), found.dq), ("k", found.of_k, x.of_k(target), found.dk))
    for side, of_map, p, whole in sides:
        if of_map is None:
            continue
        of_x, of_weight = getattr(asked, side) and not p.in_halves, getattr(asked, f"weight_{side}")
        power = p.power if getattr(asked, f"power_{side}") else None
        dx, dweight, dpower = finish(of_map, *p[1:4], power, p.pairs, p.at_end, of_x, of_weight)
        by_name |= {f"weight_{side}": dweight, f"power_{side}": dpower}
        if dx is not None:
            x.own(whole).add_(dx)
    for name, whole, part in (("sink_k", found.dk, found.dsink_k), ("sink_v", found.dv, found.dsink_v)):
        if x.sinks and whole.numel():
            whole[:, :, : x.sinks].add_(of_sinks(part, x.k.shape[1], whole.dtype))
        elif getattr(asked, name):
            by_name[name] = of_sinks(part, x.k.shape[1], getattr(x, name).dtype)
    by_name["bias"] = of_heads(found.dscore, x.bias.dtype) if asked.bias else None
    by_name["weight"] = of_heads(found.dweight, x.weight.dtype) if asked.weight else None
    return tuple(
        dx if wanted and (dx := by_name.get(name)) is not None else do.new_empty(0)
        for name, wanted in zip(Asked._fields, asked, strict=True)
    )


def _allocate_gradients(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    _, x, asked = _parts(inputs)

    def gradient(name: str) -> Tensor:
        of = getattr(x, name)
        if not getattr(asked, name):
            return do.new_empty(0)
        return empty_like_tokens(of, of.shape[3]) if name in ("q", "k", "v") else of.new_empty(of.shape)

    return tuple(gradient(name) for name in Asked._fields)


triton_train_backward = operator(
    "triton_train_backward",
    gradients,
    _allocate_gradients,
    schema=f"(Tensor do, {', '.join(f'Tensor {name}' for name in Trained._fields)}, {TENSORS}, {SETTINGS}, "
    f"{ASKED}) -> ({', '.join(['Tensor'] * len(Asked._fields))})",
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    count = Train._fields.index("map_q")
    tensors, ctx.settings = inputs[:count], inputs[count:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def backward(ctx: Any, do: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what :func:`attend` takes."""
    if do is None:
        return (None,) * len(Train._fields)
    needs = Train(*ctx.needs_input_grad)
    asked = Asked(*(getattr(needs, name) for name in Asked._fields))
    found = dict(zip(Asked._fields, _derive(do, *ctx.saved_tensors, *ctx.settings, *asked), strict=True))
    return tuple(found[name] if name in found and getattr(asked, name) else None for name in Train._fields)


torch.library.register_autograd(triton_train, backward, setup_context=_save)
attend = directly(triton_train, forward, _save, backward)
_derive = directly(triton_train_backward, gradients)
refuse_transforms("triton", triton_train, backward=triton_train_backward)
