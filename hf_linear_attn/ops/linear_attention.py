"""The public op: checks its arguments, applies feature maps, and hands over to a backend."""

from collections.abc import Callable
from typing import Literal, cast, overload

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, BackendError
from hf_linear_attn.feature_maps import FeatureMap, get_feature_map
from hf_linear_attn.ops.chunked import linear_attention_chunked
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.reference import linear_attention_reference
from hf_linear_attn.ops.state import LinearAttentionState

BACKENDS = ("auto", "reference", "torch", "triton")
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: str | FeatureMap | None = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    state: LinearAttentionState | None = ...,
    return_state: Literal[True] = ...,
    delay: int = ...,
    eps: float = ...,
    backend: str = ...,
    positions: Tensor | None = ...,
) -> tuple[Tensor, LinearAttentionState]: ...
@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: str | FeatureMap | None = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    state: LinearAttentionState | None = ...,
    *,
    return_state: Literal[False],
    delay: int = ...,
    eps: float = ...,
    backend: str = ...,
    positions: Tensor | None = ...,
) -> Tensor: ...
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: str | FeatureMap | None = "elu",
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearAttentionState | None = None,
    return_state: bool = True,
    delay: int = 0,
    eps: float = 1e-6,
    backend: str = "auto",
    positions: Tensor | None = None,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Compute normalised linear attention in O(T) time with a state of constant size.

    ``o_i = phi(q_i)^T S_i / (phi(q_i)^T z_i + eps)``, ``S_i = sum_{j <= i - delay} phi(k_j) v_j^T``,
    ``z_i = sum_{j <= i - delay} phi(k_j)`` (Katharopoulos et al., 2020, arXiv:2006.16236); with
    ``causal=False`` the sums run over all j. A query that sees no key gives 0.

    Args:
        q: Queries ``[B, H, T, D]``, bf16, fp16, fp32 or fp64, any strides.
        k: Keys ``[B, HKV, S, D]``, q's dtype; ``H % HKV == 0``, and ``S == T`` where causal.
        v: Values ``[B, HKV, S, V]``, q's dtype.
        feature_map: A registered name, a :class:`FeatureMap`, or None where q and k are features already.
        causal: Whether query i sees only keys up to ``i - delay``.
        key_mask: ``[B, S]`` bool, True = a real token. Masked keys count nowhere.
        cu_seqlens: ``[N + 1]`` int32 or int64, ``0 = c_0 <= c_1 <= ... <= c_N = T``: boundaries of N sequences
            packed along T; then ``B == 1``, and states have N rows.
        state: State before the first token, ``[B or N, HKV, ...]``; not changed.
        return_state: Whether to return the final state too.
        delay: Tokens by which keys lag, >= 0; the state returned holds keys ``j < T - delay``. 0 where not
            causal.
        eps: Added to the normaliser, away from 0; > 0.
        backend: ``"auto"`` (Triton on a GPU where it can run, else PyTorch), ``"triton"``, ``"torch"`` or
            ``"reference"`` (float64, quadratic). A backend asked for by name is used or refused.
        positions: ``[B, T]`` int64 token positions, for position-dependent feature maps.

    Returns:
        ``o [B, H, T, V]`` in q's dtype, and with ``return_state`` the pair ``(o, state)``.

    Raises:
        ArgumentError: If a shape, device, size or name does not fit.
        ArgumentTypeError: If a dtype does not fit.
        BackendError: If the backend asked for cannot run here.

    Example:
        >>> import torch
        >>> from hf_linear_attn import linear_attention
        >>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
        >>> whole, _ = linear_attention(q, k, v)
        >>> first, state = linear_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4])
        >>> rest, _ = linear_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], state=state)
        >>> torch.allclose(whole, torch.cat([first, rest], dim=2), atol=1e-6)
        True
    """
    _check_types(q, k, v, feature_map, key_mask, cu_seqlens, state, positions)
    _check_qkv(q, k, v, causal)
    _check_masks(q, k, causal, key_mask, cu_seqlens, delay)
    if positions is not None and positions.shape != (q.shape[0], q.shape[2]):
        raise ArgumentError(
            "positions", f"have shape [B, T] = {(q.shape[0], q.shape[2])}", tuple(positions.shape), "Slice it."
        )
    if eps <= 0:
        raise ArgumentError("eps", "be greater than 0", eps, "The default is 1e-6.")
    if backend not in BACKENDS:
        raise ArgumentError("backend", "be a known backend", backend, "Use one of those", available=BACKENDS)
    if isinstance(feature_map, str):
        feature_map = get_feature_map(feature_map, q.shape[-1], q.shape[1], k.shape[1])
        if feature_map.kernel is None:
            # Kernels compute the others, whose modules hold nothing.
            feature_map.to(q.device)
    phi = "identity"
    # Features and states have a precision of their own, whatever products around them are cast to.
    with torch.autocast(q.device.type, enabled=False):
        if feature_map is not None:
            if feature_map.kernel is None:
                q = features_of(feature_map, q, "q", positions, backend)
                k = features_of(feature_map, k, "k", positions, backend)
            else:
                phi = feature_map.kernel
        _check_state(q, k, v, cu_seqlens, state)
        # Chosen last: features may be wider than heads, and kernels hold only so much.
        function = _backend(backend, q, k, v)
        o, final = function(
            q,
            k,
            v,
            phi=phi,
            causal=causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            state=state,
            delay=delay,
            eps=eps,
        )
    return (o, final) if return_state else o


def _check_types(
    q: object,
    k: object,
    v: object,
    feature_map: object,
    key_mask: object,
    cu_seqlens: object,
    state: object,
    positions: object,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(name, "be a tensor", type(x).__name__, "Use torch.as_tensor.")
    for name, x in (("key_mask", key_mask), ("cu_seqlens", cu_seqlens), ("positions", positions)):
        if not isinstance(x, Tensor | None):
            raise ArgumentTypeError(name, "be a tensor or None", type(x).__name__, "Use torch.as_tensor.")
    if not isinstance(feature_map, str | FeatureMap | None):
        raise ArgumentTypeError("feature_map", "be a name, a FeatureMap or None", feature_map, 'The default is "elu".')
    if not isinstance(state, LinearAttentionState | None):
        raise ArgumentTypeError(
            "state", "be a LinearAttentionState or None", type(state).__name__, "Use LinearAttentionState(kv, z)."
        )


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ArgumentError(name, "have 4 dimensions [B, heads, tokens, dim]", tuple(x.shape), "Reshape it.")
        if x.dtype not in FLOATING:
            raise ArgumentTypeError(name, "be bf16, fp16, fp32 or fp64", x.dtype, "Cast it.")
        if x.dtype != q.dtype:
            raise ArgumentTypeError(name, f"have q's dtype {q.dtype}", x.dtype, f"Cast {name} or q.")
        if x.device != q.device:
            raise ArgumentError(name, f"be on q's device {q.device}", str(x.device), f"Move {name} or q.")
        if 0 in x.shape:
            raise ArgumentError(name, "not be empty", tuple(x.shape), "Skip the call for empty input.")
    if k.shape[:3] != v.shape[:3]:
        raise ArgumentError(
            "v",
            f"match k's [B, HKV, S] = {tuple(k.shape[:3])}",
            tuple(v.shape),
            "Pass k and v of the same tokens.",
        )
    if q.shape[0] != k.shape[0]:
        raise ArgumentError("k", f"have q's batch size {q.shape[0]}", tuple(k.shape), "Pass the same batch.")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError("k", f"have q's head dim {q.shape[3]}", tuple(k.shape), "Pass q and k of one layer.")
    if q.shape[1] % k.shape[1]:
        raise ArgumentError(
            "k",
            f"have a head count that divides q's {q.shape[1]}",
            k.shape[1],
            "Check the grouping of heads.",
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ArgumentError(
            "k",
            f"have q's {q.shape[2]} tokens where causal",
            k.shape[2],
            "Carry earlier tokens in `state`.",
        )


def _check_masks(
    q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, cu_seqlens: Tensor | None, delay: int
) -> None:
    if delay < 0 or (delay and not causal):
        raise ArgumentError(
            "delay",
            "be >= 0, and 0 where not causal",
            delay,
            "A delay only makes sense in causal attention.",
        )
    if key_mask is not None:
        if key_mask.dtype != torch.bool:
            raise ArgumentTypeError("key_mask", "be bool, True = a real token", key_mask.dtype, "Use mask.bool().")
        if key_mask.shape != (k.shape[0], k.shape[2]):
            raise ArgumentError(
                "key_mask",
                f"have shape [B, S] = {(k.shape[0], k.shape[2])}",
                tuple(key_mask.shape),
                "Slice it.",
            )
        if key_mask.device != q.device:
            raise ArgumentError("key_mask", f"be on q's device {q.device}", str(key_mask.device), "Move it.")
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError("cu_seqlens", "be int32 or int64", cu_seqlens.dtype, "Cast it.")
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
            raise ArgumentError(
                "cu_seqlens",
                "have shape [N + 1], N >= 1",
                tuple(cu_seqlens.shape),
                "Prepend 0 to the lengths' sum.",
            )
        if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
            raise ArgumentError(
                "q", "have B = 1 and T = S with cu_seqlens", tuple(q.shape), "Pack the sequences along T."
            )
        _check_bounds(cu_seqlens, q.shape[2])


def _check_bounds(cu_seqlens: Tensor, tokens: int) -> None:
    """Check the boundaries of packed sequences; on a GPU without waiting for it, and not while a graph is built."""
    if torch.compiler.is_compiling():
        return
    rule = f"rise from 0 to T = {tokens}"
    good = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (cu_seqlens.diff() >= 0).all()
    if cu_seqlens.device.type == "cpu":
        if not good:
            raise ArgumentError("cu_seqlens", rule, cu_seqlens.tolist(), "Prepend 0 to the lengths' sum.")
    elif cu_seqlens.is_cuda:
        torch._assert_async(good, f"`cu_seqlens` must {rule}")


def _check_state(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, state: LinearAttentionState | None
) -> None:
    if state is None:
        return
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shapes = {"kv": (rows, k.shape[1], k.shape[3], v.shape[3]), "z": (rows, k.shape[1], k.shape[3])}
    for name, shape in shapes.items():
        x = getattr(state, name)
        if x.shape != shape:
            raise ArgumentError(f"state.{name}", f"have shape {shape}", tuple(x.shape), "Pass this layer's state.")
        if x.dtype != dtype:
            raise ArgumentTypeError(f"state.{name}", f"be {dtype}", x.dtype, "States are never kept in less.")
        if x.device != q.device:
            raise ArgumentError(f"state.{name}", f"be on q's device {q.device}", str(x.device), "Move it.")


Backend = Callable[..., tuple[Tensor, LinearAttentionState]]


def _backend(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Backend:
    if backend in ("auto", "triton"):
        # Imported here so that the package needs neither Triton nor a GPU.
        from hf_linear_attn.ops import triton as triton_backend

        obstacle = triton_backend.obstacle(q, k, v)
        if obstacle is None and (backend == "triton" or q.is_cuda):
            return cast(Backend, triton_backend.linear_attention_triton)
        if backend == "triton":
            raise BackendError("backend", "be able to run here", backend, f"{obstacle}; use backend='torch'.")
    return linear_attention_reference if backend == "reference" else linear_attention_chunked
