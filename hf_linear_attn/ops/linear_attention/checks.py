"""What linear attention asks of its arguments."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_linear_attn.checks import check_type
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.state import LinearAttentionState

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_tensors(required: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Check that what is asked for is a tensor, and what may be missing a tensor or None."""
    for given, rule in ((required, "be a tensor"), (optional, "be a tensor or None")):
        for name, x in given.items():
            if not (isinstance(x, Tensor) or (x is None and given is optional)):
                raise ArgumentTypeError(name, rule, type(x).__name__, "Use torch.as_tensor.")


def check_positions(positions: Tensor, q: Tensor) -> None:
    """Check the positions of tokens."""
    if positions.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(
            "positions", "be int64 or int32", positions.dtype, "Count tokens: they are whole numbers."
        )
    shape = q.shape[0], q.shape[2]
    if positions.shape != shape:
        raise ArgumentError("positions", f"have shape [B, T] = {shape}", tuple(positions.shape), "Slice it.")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Check shapes, dtypes and devices of queries, keys and values."""
    # Attributes of tensors are read once: each takes as long as a comparison or two.
    dtype, device, sizes = q.dtype, q.device, (q.shape, k.shape, v.shape)
    for name, x, shape in zip("qkv", (q, k, v), sizes, strict=True):
        if len(shape) != 4:
            raise ArgumentError(name, "have 4 dimensions [B, heads, tokens, dim]", tuple(shape), "Reshape it.")
        own = x.dtype
        if own not in FLOATING:
            raise ArgumentTypeError(name, "be bf16, fp16, fp32 or fp64", own, "Cast it.")
        if own != dtype:
            raise ArgumentTypeError(name, f"have q's dtype {dtype}", own, f"Cast {name} or q.")
        if x.device != device:
            raise ArgumentError(name, f"be on q's device {device}", str(x.device), f"Move {name} or q.")
        if 0 in shape:
            raise ArgumentError(name, "not be empty", tuple(shape), "Skip the call for empty input.")
    of_q, of_k, of_v = sizes
    if of_k[:3] != of_v[:3]:
        raise ArgumentError(
            "v", f"match k's [B, HKV, S] = {tuple(of_k[:3])}", tuple(of_v), "Pass k and v of the same tokens."
        )
    if of_q[0] != of_k[0]:
        raise ArgumentError("k", f"have q's batch size {of_q[0]}", tuple(of_k), "Pass the same batch.")
    if of_q[3] != of_k[3]:
        raise ArgumentError("k", f"have q's head dim {of_q[3]}", tuple(of_k), "Pass q and k of one layer.")
    check_groups(of_q[1], of_k[1])
    if causal and of_q[2] != of_k[2]:
        raise ArgumentError("k", f"have q's {of_q[2]} tokens where causal", of_k[2], "Carry earlier tokens in `state`.")


def check_groups(heads: int, kv_heads: int) -> None:
    """Check that as many query heads share each key head."""
    if heads % kv_heads:
        rule = f"have a head count that divides q's {heads}"
        raise ArgumentError("k", rule, kv_heads, "Check the grouping of heads.")


def check_masks(
    q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, cu_seqlens: Tensor | None, delay: int
) -> None:
    """Check what says which keys count."""
    check_type("delay", delay, int)
    if not 0 <= delay <= 2**62 or (delay and not causal):
        rule = "lie in 0..2**62, and be 0 where not causal"
        raise ArgumentError("delay", rule, delay, "A delay only makes sense in causal attention.")
    if key_mask is not None:
        shape = k.shape[0], k.shape[2]
        if key_mask.dtype != torch.bool:
            raise ArgumentTypeError("key_mask", "be bool, True = a real token", key_mask.dtype, "Use mask.bool().")
        if key_mask.shape != shape:
            raise ArgumentError("key_mask", f"have shape [B, S] = {shape}", tuple(key_mask.shape), "Slice it.")
        if key_mask.device != q.device:
            raise ArgumentError("key_mask", f"be on q's device {q.device}", str(key_mask.device), "Move it.")
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError("cu_seqlens", "be int32 or int64", cu_seqlens.dtype, "Cast it.")
        if cu_seqlens.device != q.device:
            raise ArgumentError("cu_seqlens", f"be on q's device {q.device}", str(cu_seqlens.device), "Move it.")
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
            rule, remedy = "have shape [N + 1], N >= 1", "Prepend 0 to the lengths' sum."
            raise ArgumentError("cu_seqlens", rule, tuple(cu_seqlens.shape), remedy)
        if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
            raise ArgumentError(
                "q", "have B = 1 and T = S with cu_seqlens", tuple(q.shape), "Pack the sequences along T."
            )
        _check_bounds(cu_seqlens, q.shape[2])


def check_log_decay(log_decay: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    """Check by what sums fade.

    Returns:
        It, with 0 for masked keys: they fade nothing, whatever they hold.
    """
    check_tensors({}, {"log_decay": log_decay})
    if not causal:
        raise ArgumentError(
            "log_decay", "be None where not causal", tuple(log_decay.shape), "Sums fade from one token to the next."
        )
    check_gate("log_decay", log_decay, k, None, 0, key_mask, "Sums may fade, not grow: use -softplus(x).")
    return log_decay if key_mask is None else log_decay.masked_fill(~key_mask[:, None], 0)


def check_gate(
    name: str, x: Tensor, k: Tensor, low: float | None, high: float, key_mask: Tensor | None, remedy: str
) -> None:
    """Check that there is a number for each key, within bounds where keys count.

    Numbers are looked at on a GPU without waiting for it, and not while a graph is built.
    """
    shape = k.shape[:3]
    if x.shape != shape:
        rule = f"have k's [B, HKV, S] = {tuple(shape)}"
        raise ArgumentError(name, rule, tuple(x.shape), "Pass one number per key head and token.")
    if x.dtype not in FLOATING:
        raise ArgumentTypeError(name, "be bf16, fp16, fp32 or fp64", x.dtype, "Cast it.")
    if x.device != k.device:
        raise ArgumentError(name, f"be on k's device {k.device}", str(x.device), f"Move {name}.")
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    x = x.detach()
    # NaN is not outside: whatever a model computed of NaN is to be seen, not refused.
    wrong = x > high if low is None else (x > high) | (x < low)
    if key_mask is not None:
        wrong &= key_mask[:, None]
    rule = f"be at most {high}" if low is None else f"lie in {low}..{high}"
    if x.device.type == "cpu":
        # Asked this way round, a tensor without numbers is right.
        if not (~wrong).all():
            raise ArgumentError(name, rule, float(x[wrong][0]), remedy)
    elif x.is_cuda:
        torch._assert_async(~wrong.any(), f"`{name}` must {rule}. {remedy}")


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


def check_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, state: LinearAttentionState | None) -> None:
    """Check a state against features and values; the last check, since features have sizes of their own."""
    if state is None:
        return
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    sizes = rows, k.shape[1], k.shape[3]
    check_sums("state.kv", state.kv, (*sizes, v.shape[3]), q)
    check_sums("state.z", state.z, sizes, q)


def check_sums(name: str, x: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    """Check a tensor of a state."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if x.shape != shape:
        raise ArgumentError(name, f"have shape {shape}", tuple(x.shape), "Pass this layer's state.")
    if x.dtype != dtype:
        raise ArgumentTypeError(name, f"be {dtype}", x.dtype, "States are never kept in less.")
    if x.device != q.device:
        raise ArgumentError(name, f"be on q's device {q.device}", str(x.device), "Move it.")
