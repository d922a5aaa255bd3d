"""The kernel of a step as a torch.library op."""

from torch import Tensor

from hf_linear_attn.ops.library import operator, refuse_vmap
from hf_linear_attn.ops.state import like_values
from hf_linear_attn.ops.step.checks import check_step_mask
from hf_linear_attn.ops.step.triton.kernels import decode_launch
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import as_bytes, changing, directly, execute, target_for


def _step(
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
    check_step_mask(key_mask, q)
    tokens = readable(q), readable(k), readable(v)
    return execute(decode_launch, target_for(q.device), *tokens, kv, z, as_bytes(key_mask), phi, eps, log_decay, rows)


triton_decode_ = operator("triton_decode_", _step, like_values, changes=("kv", "z"))
refuse_vmap("triton", triton_decode_)
decode_step_triton_ = directly(triton_decode_, changing(_step, 4, 5))
