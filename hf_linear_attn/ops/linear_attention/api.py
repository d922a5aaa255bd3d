"""The public op: checks its arguments, applies feature maps, and hands over to a backend."""

from typing import Literal, overload

import torch
from torch import Tensor

from hf_linear_attn.checks import check_eps, check_type
from hf_linear_attn.errors import ArgumentTypeError
from hf_linear_attn.feature_maps import FeatureMap, get_feature_map
from hf_linear_attn.ops.dispatch import LARGEST_FEATURES, LARGEST_HEAD, choose_backend, kernel_obstacle
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.library import own_precision
from hf_linear_attn.ops.linear_attention.checks import (
    check_log_decay,
    check_masks,
    check_positions,
    check_qkv,
    check_state,
    check_tensors,
)
from hf_linear_attn.ops.linear_attention.problem import LinearCall
from hf_linear_attn.ops.linear_attention.reference import linear_attention_reference
from hf_linear_attn.ops.linear_attention.torch import linear_attention_chunked
from hf_linear_attn.ops.state import LinearAttentionState


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
    log_decay: Tensor | None = ...,
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
    log_decay: Tensor | None = ...,
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
    log_decay: Tensor | None = None,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Compute normalised linear attention in O(T) time with a state of constant size.

    ``o_i = phi(q_i)^T S_i / (phi(q_i)^T z_i + eps)``, ``S_i = sum_{j <= i - delay} phi(k_j) v_j^T``,
    ``z_i = sum_{j <= i - delay} phi(k_j)`` (Katharopoulos et al., 2020, arXiv:2006.16236); with
    ``causal=False`` the sums run over all j. A query that sees no key gives 0. With log decays the sums fade before
    each key is added, ``S_j = exp(log_decay_j) S_{j-1} + phi(k_j) v_j^T``, and z alike, so that old keys count less.

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
        log_decay: ``[B, HKV, S]``, <= 0, any floating dtype: by whose exponential the sums fade when a key comes; None
            where they do not, and where not causal. Masked keys fade nothing. Minus infinity is a reset: the sums are
            0 before the key is added, and no gradient crosses it; below -1000 it counts as that.

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
    for name, flag in (("causal", causal), ("return_state", return_state)):
        check_type(name, flag, bool)
    optional = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "positions": positions}
    check_tensors({"q": q, "k": k, "v": v}, optional)
    if feature_map is not None and not isinstance(feature_map, (FeatureMap, str)):
        raise ArgumentTypeError("feature_map", "be a name, a FeatureMap or None", feature_map, 'The default is "elu".')
    if state is not None and not isinstance(state, LinearAttentionState):
        kind, remedy = type(state).__name__, "Use LinearAttentionState(kv, z)."
        raise ArgumentTypeError("state", "be a LinearAttentionState or None", kind, remedy)
    check_qkv(q, k, v, causal)
    check_masks(q, k, causal, key_mask, cu_seqlens, delay)
    if log_decay is not None:
        log_decay = check_log_decay(log_decay, k, causal, key_mask)
    if positions is not None:
        check_positions(positions, q)
    eps = check_eps(eps)
    if isinstance(feature_map, str):
        feature_map = get_feature_map(feature_map, q.shape[-1], q.shape[1], k.shape[1])
        if feature_map.kernel is None:
            # Kernels compute the others, whose modules hold nothing.
            feature_map.to(q.device)
    # Features and states have a precision of their own, whatever products around them are cast to.
    with own_precision(q.device):
        q, k, phi = _mapped(feature_map, q, k, key_mask, positions, backend)
        check_state(q, k, v, cu_seqlens, state)
        kv0, z0 = state or (None, None)
        call = LinearCall(q, k, v, key_mask, cu_seqlens, kv0, z0, log_decay, phi, causal, delay, eps)
        # Chosen last: features may be wider than heads, and kernels hold only so much. Products of fp32 over so many
        # columns take kilobytes of stack.
        largest = LARGEST_HEAD if q.dtype == torch.float32 else LARGEST_FEATURES
        chosen = choose_backend(backend, q.device, lambda: kernel_obstacle(q, k, v, largest))
        if chosen == "triton":
            # Imported here so that the package needs neither Triton nor a GPU.
            from hf_linear_attn.ops.linear_attention.triton.op import linear_attention_triton

            o, final = linear_attention_triton(call)
        else:
            o, final = (linear_attention_reference if chosen == "reference" else linear_attention_chunked)(call)
    return (o, final) if return_state else o


def _mapped(
    feature_map: FeatureMap | None,
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    positions: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, str]:
    """Return queries and keys as kernels are given them, and the name of the map that these compute themselves."""
    if feature_map is None:
        return q, k, "identity"
    if feature_map.kernel is not None:
        return q, k, feature_map.kernel
    if key_mask is not None:
        # Of a masked NaN the map's weights would get one.
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    phi_q = features_of(feature_map, q, "q", positions, backend)
    return phi_q, features_of(feature_map, k, "k", positions, backend), "identity"
