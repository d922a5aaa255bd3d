"""What distillation's recommended recipe asks of a layer besides linear attention, as problems for the kernels."""

import torch

from hf_linear_attn.layers.retention.learned import AHEAD
from hf_linear_attn.ops.delta_rule.triton.problem import DeltaProblem
from hf_linear_attn.ops.features import LARGEST_PAIR
from hf_linear_attn.ops.features.triton.kernels import FeatureProblem
from hf_linear_attn.ops.hybrid import HybridStep, KeptStep, Prefill
from hf_linear_attn.ops.kept import AGES, Entering
from hf_linear_attn.ops.triton.plan import Problem, has_tile, tile
from hf_linear_attn.ops.window.api import LARGEST_FP32 as LARGEST_WINDOW_FP32
from hf_linear_attn.ops.window.problem import KeptKeys
from hf_linear_attn.ops.window.triton.problem import Kept, WindowProblem, held_by_block

WINDOW, SINKS = 64, 4
UNITS = 64
"""Units of a learned rule's net, the most that a student has been saved with."""


def window_problem(p: Problem) -> WindowProblem | None:
    """Return the window with its sinks and a key of each query's own; None where the kernels do not hold it.

    Args:
        p: Linear attention over the same queries, keys and values, on any device.
    """
    (batch, heads, tokens, _), kv_heads, D, V = p.q.shape, p.k.shape[1], p.k.shape[3], p.v.shape[3]
    device, dtype = p.q.device, p.q.dtype
    if dtype == torch.float32 and max(D, V) > LARGEST_WINDOW_FP32:
        return None
    return WindowProblem(
        p.target,
        p.q,
        p.k,
        p.v,
        codes=torch.full((batch, tokens), 3, dtype=torch.uint8, device=device),
        sink_k=torch.randn(batch, kv_heads, SINKS, D, dtype=dtype, device=device),
        sink_v=torch.randn(batch, kv_heads, SINKS, V, dtype=dtype, device=device),
        seen=torch.ones(batch, tokens, SINKS, dtype=torch.uint8, device=device),
        f=torch.randn(batch, tokens, heads, V, dtype=dtype, device=device).transpose(1, 2),
        number=torch.arange(tokens, device=device).sub(WINDOW - 1).clamp(min=0).expand(batch, -1).contiguous(),
        before=None,
        bias=torch.zeros(heads, device=device),
        weight=torch.zeros(heads, D, device=device),
        given=None,
        kept=None,
        window=WINDOW,
        scaling=D**-0.5,
    )


def beside_kept(window: WindowProblem) -> WindowProblem:
    """Return a window alone, beside as many kept keys as it has tokens, each of which is in sight for as long."""
    (batch, _, tokens, _), (_, kv_heads, _, D), V = window.q.shape, window.k.shape, window.v.shape[3]
    device, dtype, every = window.q.device, window.q.dtype, WINDOW + tokens
    number = torch.arange(every, device=device)
    lies = KeptKeys(
        k=torch.randn(batch, kv_heads, every, D, dtype=dtype, device=device),
        v=torch.randn(batch, kv_heads, every, V, dtype=dtype, device=device),
        slot=(number[:tokens] % WINDOW).expand(batch, kv_heads, -1).contiguous(),
        begins=(number - WINDOW).expand(batch, -1).contiguous(),
        ends=number.expand(batch, kv_heads, -1).contiguous(),
    )
    own = dict.fromkeys(("f", "number", "before", "bias", "weight"))
    return window._replace(**own, kept=Kept(*lies, held_by_block(lies)))


def choice_problem(p: Problem, *, scores: bool) -> Entering:
    """Return the choice of as many kept keys as the window has tokens: by scores, or by values."""
    (batch, _, tokens, _), kv_heads, device = p.q.shape, p.k.shape[1], p.q.device
    size, dtype = (AGES, torch.float32) if scores else (p.v.shape[3], p.v.dtype)
    at = torch.arange(WINDOW, device=device).expand(batch, kv_heads, -1).contiguous()
    return Entering(
        compared=torch.randn(batch, kv_heads, WINDOW + tokens, size, dtype=dtype, device=device),
        enters=torch.ones(batch, tokens, dtype=torch.bool, device=device),
        positions=torch.arange(tokens, device=device).add(WINDOW).expand(batch, -1).contiguous(),
        number=torch.full((batch,), WINDOW, device=device),
        nearest=torch.rand(batch, kv_heads, 0 if scores else WINDOW, device=device),
        at=at,
        window=WINDOW if scores else 0,
    )


def delta_problem(p: Problem) -> DeltaProblem:
    """Return the gated delta rule over the same queries, keys and values, with gates laid out as projections write."""
    (batch, _, tokens, _), kv_heads = p.q.shape, p.k.shape[1]
    beta, g = (torch.rand(batch, tokens, kv_heads, device=p.q.device).transpose(1, 2) for _ in range(2))
    return DeltaProblem(p.target, p.q, p.k, p.v, beta, -g, p.mask, p.cu_seqlens, p.kv0, p.delay, l2norm=True)


def feature_problem(p: Problem) -> FeatureProblem | None:
    """Return the norm-preserving features of the same queries, the longer of both kernels, or None likewise."""
    heads, D = p.q.shape[1], p.k.shape[3]
    if D > LARGEST_PAIR:
        return None
    weight = torch.randn(heads, D, D, device=p.q.device)
    power = torch.full((heads,), 3.0, device=p.q.device)
    turns = torch.randn(1, p.q.shape[2], D, device=p.q.device, dtype=p.q.dtype)
    return FeatureProblem(p.target, p.q, turns, weight, power, "norm_preserving", 1.0, D**-0.25, "half", at_end=False)


def prefill_problem(p: Problem) -> Prefill | None:
    """Return the whole layer over the same text, from a state and with padding; None where no tile holds it."""
    of_window, of_features = window_problem(p), feature_problem(p)
    if of_window is None or of_features is None or of_window.codes is None:
        return None
    (batch, _, tokens, D), kv_heads, V, device = p.q.shape, p.k.shape[1], p.v.shape[3], p.q.device
    if not has_tile(p.target, p.q.dtype, "prefill", 2 * D, V):
        return None
    phi_k = torch.rand(batch, tokens, kv_heads, 2 * D, dtype=p.q.dtype, device=device).transpose(1, 2)
    kv, z, far_keys = (torch.zeros(batch, kv_heads, *sizes, device=device) for sizes in ((2 * D, V), (2 * D,), (D,)))
    return Prefill(
        p.q,
        p.k,
        p.v,
        phi_k,
        of_window.codes,
        of_window.codes >> 1,
        of_window.sink_k,
        of_window.sink_v,
        of_window.seen,
        of_window.number,
        far_keys,
        kv,
        z,
        of_features.turns,
        of_features.weight,
        of_features.power,
        of_window.bias,
        torch.zeros(p.q.shape[1], D, device=device),
        of_features.name,
        of_features.factor,
        of_features.sharpness,
        of_features.pairs,
        of_features.at_end,
        WINDOW,
        of_window.scaling,
        1e-6,
    )


def keeping(step: HybridStep, *, scores: bool) -> HybridStep:
    """Return a step that keeps as many keys beyond the window as that has tokens, chosen by scores or by values."""
    (batch, kv_heads, _, D), V = step.near_k.shape, step.v.shape[3]

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(batch, kv_heads, WINDOW, *sizes, dtype=dtype, device=step.q.device)

    inputs = 2 * kv_heads * (D + V)
    net = (
        (inputs,),
        (inputs,),
        (kv_heads, inputs, UNITS),
        (kv_heads, UNITS),
        (kv_heads, UNITS, AGES),
        (kv_heads, AGES),
    )
    kept = KeptStep(
        k=new(D, dtype=step.k.dtype),
        v=new(V, dtype=step.v.dtype),
        # No two have the same number.
        at=torch.arange(WINDOW, device=step.q.device).expand(batch, kv_heads, -1).contiguous(),
        turns=None if step.near_turns is None else new(D, dtype=step.k.dtype),
        nearest=None if scores else new(),
        scores=new(AGES) if scores else None,
        weights=tuple(torch.ones(size, device=step.q.device) for size in net) if scores else (),
        ahead=AHEAD if scores else 0,
    )
    return step._replace(kept=kept)


def in_pool(step: HybridStep) -> HybridStep:
    """Return a step of texts whose states lie anywhere in a pool."""
    batch = len(step.q)
    one = {name: x[:, :, 0].contiguous() for name in ("z", "far_keys") if (x := getattr(step, name)) is not None}
    lengths = step.seen.new_ones(batch)
    turns = None if step.turns is None else step.turns.expand(batch, -1, -1).contiguous()
    return step._replace(key_mask=None, near_mask=None, seen=lengths, place=lengths, rows=step.seen, turns=turns, **one)


def hybrid_problem(p: Problem) -> HybridStep | None:
    """Return a step of the recipe with its state, as a captured graph replays it, or None likewise.

    Beyond the paired map's sizes its features are elu's.
    """
    device, dtype, fp32 = p.q.device, p.q.dtype, torch.float32
    (batch, heads, _, D), kv_heads, V = p.q.shape, p.k.shape[1], p.v.shape[3]
    if dtype == fp32 and max(D, V) > LARGEST_WINDOW_FP32:
        return None
    paired, slots = D <= LARGEST_PAIR, SINKS + WINDOW + 1
    features = 2 * D if paired else D
    copies = -(-V // tile(p.target, dtype, "hybrid", features, V, heads // kv_heads).width)

    def zeros(*sizes: int, dtype: torch.dtype = fp32) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    return HybridStep(
        *(x[:, :, :1] for x in (p.q, p.k, p.v)),
        key_mask=zeros(batch, 1, dtype=torch.bool),
        seen=zeros(batch, dtype=torch.int64),
        place=torch.zeros((), dtype=torch.int64, device=device),
        length=0,
        rows=None,
        kv=zeros(batch, kv_heads, features, V),
        z=zeros(batch, kv_heads, copies, features),
        far_keys=zeros(batch, kv_heads, copies, D),
        near_k=zeros(batch, kv_heads, slots, D, dtype=dtype),
        near_v=zeros(batch, kv_heads, slots, V, dtype=dtype),
        near_mask=zeros(batch, slots, dtype=torch.bool),
        near_turns=zeros(batch, slots, D, dtype=dtype),
        turns=zeros(1, 1, D, dtype=dtype),
        weight_q=zeros(heads, D, D) if paired else None,
        power_q=zeros(heads) if paired else None,
        weight_k=zeros(kv_heads, D, D) if paired else None,
        power_k=zeros(kv_heads) if paired else None,
        decay_bias=zeros(kv_heads),
        decay_key=zeros(kv_heads, D),
        decay_value=zeros(kv_heads, V),
        bias=zeros(heads),
        weight=zeros(heads, D),
        phi="norm_preserving" if paired else "elu",
        factor=1.0,
        sharpness=D**-0.25,
        mix="key",
        sinks=SINKS,
        scaling=D**-0.5,
        eps=1e-6,
        pairs="half",
        at_end=False,
    )
