"""The kernel of a step as a torch.library op."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import refuse_vmap
from hf_linear_attn.ops.state import LinearAttentionState, empty_like_tokens
from hf_linear_attn.ops.step.checks import check_decode
from hf_linear_attn.ops.step.triton.kernels import decode_launch
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import directly, execute, has_changed, target_for


def decode_step_triton_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    *,
    phi: str,
    key_mask: Tensor | None,
    eps: float,
    log_decay: Tensor | None,
    rows: Tensor | None,
) -> Tensor:
    """Run one decode step in place; see :func:`hf_linear_attn.ops.step.decode_step_`."""
    kv, z = state
    o: Tensor = _fold(q, k, v, key_mask, kv, z if z.ndim == 4 else z[:, :, None], phi, eps, log_decay, rows)
    return o


@torch.library.custom_op("hf_linear_attn::triton_decode_", mutates_args=("kv", "z"))
def triton_decode_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    z: Tensor,
    phi: str,
    eps: float,
    log_decay: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return o of a few tokens and fold them into ``kv`` and ``z [B, HKV, C, D]`` in place."""
    return _step(q, k, v, key_mask, kv, z, phi, eps, log_decay, rows)


def _changing(*inputs: Any) -> Tensor:
    """Run a step and tell autograd, as the op does, that the state has changed."""
    o = _step(*inputs)
    has_changed(*inputs[4:6])
    return o


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    z: Tensor,
    phi: str,
    eps: float,
    log_decay: Tensor | None,
    rows: Tensor | None = None,
) -> Tensor:
    check_decode(q, k, v, kv, z, key_mask, rows)
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    tokens = readable(q), readable(k), readable(v)
    return execute(decode_launch, target_for(q.device), *tokens, kv, z, mask, phi, eps, log_decay, rows)


@triton_decode_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> Tensor:
    return empty_like_tokens(q, v.shape[3])


refuse_vmap("triton", triton_decode_)

_fold = directly(triton_decode_, _changing)
