"""What the delta rule asks of its arguments beyond what linear attention does."""

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.delta_rule.problem import DeltaCall
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.linear_attention.checks import check_gate, check_masks, check_qkv, check_sums, check_tensors
from hf_linear_attn.ops.state import LinearAttentionState

LARGEST_BETA = 2
"""Beyond it a state grows by being written to: a key is erased more than once over."""


def check_state(state: object) -> None:
    """Check what a state is, not yet whether it fits."""
    # Of linear attention, it may have a normaliser.
    if not isinstance(state, DeltaRuleState | LinearAttentionState | None):
        raise ArgumentTypeError("state", "be a DeltaRuleState or None", type(state).__name__, "Use DeltaRuleState(kv).")
    if state is not None and state.z is not None:
        raise ArgumentError("state.z", "be None", tuple(state.z.shape), "The delta rule has no normaliser.")


def check_call(call: DeltaCall) -> None:
    """Check everything that a call is made of.

    Raises:
        ArgumentError: If a shape, device or number does not fit.
        ArgumentTypeError: If a type does not.
    """
    required, optional = (
        {name: getattr(call, name) for name in names}
        for names in (("q", "k", "v", "beta"), ("log_decay", "key_mask", "cu_seqlens"))
    )
    check_tensors(required, optional)
    q, k, v, key_mask = call.q, call.k, call.v, call.key_mask
    check_qkv(q, k, v, True)
    check_masks(q, k, True, key_mask, call.cu_seqlens, call.delay)
    check_gate("beta", call.beta, k, 0, LARGEST_BETA, key_mask, "Use a sigmoid, or twice that.")
    if call.log_decay is not None:
        check_gate("log_decay", call.log_decay, k, None, 0, key_mask, "It is a logarithm: use -softplus(x).")
    if call.kv0 is not None:
        check_sums("state.kv", call.kv0, (call.rows, k.shape[1], k.shape[3], v.shape[3]), q)
