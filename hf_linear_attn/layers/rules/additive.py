"""The additive rule of linear attention: a running sum of ``phi(k) v^T`` and one of ``phi(k)``."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.layers.rules.base import Reading, Rule, RuleCall, RuleStep
from hf_linear_attn.layers.state import Slot
from hf_linear_attn.ops import LinearAttentionState, linear_attention
from hf_linear_attn.ops.step import decode_opaque_, decode_plain_, fade_, fold_and_read_
from hf_linear_attn.ops.window import key_product, running_sum


class Additive(Rule):
    """Compute ``o = phi(q)^T S / (phi(q)^T z + eps)``, ``S += phi(k) v^T``, ``z += phi(k)``.

    Katharopoulos et al., 2020, arXiv:2006.16236.
    """

    name: ClassVar[str] = "additive"
    provides: ClassVar[frozenset[str]] = frozenset({"mass"})
    steps: ClassVar[bool] = True
    steps_rows: ClassVar[bool] = True

    @override
    def slots(self, kv_heads: int, feature_dim: int, value_dim: int, copies: int | None = None) -> dict[str, Slot]:
        return {
            "kv": Slot((kv_heads, feature_dim, value_dim)),
            "z": Slot((kv_heads, feature_dim), copies=copies),
        }

    @override
    def read(self, call: RuleCall, state: Mapping[str, Tensor] | None) -> Reading:
        o, final = linear_attention(
            call.phi_q,
            call.phi_k,
            call.v,
            None if call.kernel is None else elementwise_map(call.kernel),
            causal=call.causal,
            key_mask=call.key_mask,
            cu_seqlens=call.cu_seqlens,
            state=None if state is None else LinearAttentionState(state["kv"], state["z"]),
            delay=call.delay,
            eps=self.eps,
            backend=self.backend,
            log_decay=None if call.gates is None else call.gates.log_decay,
        )
        return Reading(o, {"kv": final.kv, "z": final.z}, self.mass(call, state) if call.with_mass else None)

    def mass(self, call: RuleCall, state: Mapping[str, Tensor] | None) -> Tensor:
        """Return what outputs are divided by, but for eps, ``[B, H, T]``."""
        read = max(call.phi_k.shape[2] - call.delay, 0)
        keys = upcast(call.phi_k[:, :, :read])
        if call.key_mask is not None:
            keys = keys * call.key_mask[:, None, :read, None]
        z = running_sum(keys, call.phi_q.shape[2] - read, None if state is None else state["z"])
        return key_product(call.phi_q, z)

    @override
    def step_(self, step: RuleStep, state: Mapping[str, Tensor]) -> Tensor:
        phi_q, phi_k, v, gates, kernel, key_mask, signed, rows, kernels = step
        # An elementwise map is chosen by name, which a compiler does not trace: one node of its graph does all.
        named = kernel is not None and torch.compiler.is_compiling()
        log_decay = None if gates is None else gates.log_decay
        if not named and not kernels:
            if kernel is not None:
                phi = elementwise_map(kernel)
                phi_q, phi_k, signed = phi.phi(phi_q), phi.phi(phi_k), not phi.non_negative
            if log_decay is not None:
                fade_(state["kv"], state["z"], log_decay, key_mask)
            return fold_and_read_(phi_q, phi_k, v, state["kv"], state["z"], key_mask, self.eps, signed)
        decode = decode_opaque_ if torch.compiler.is_compiling() else decode_plain_
        q, name = phi_q.flatten(1, 2)[:, :, None], kernel or "identity"
        o = decode(q, phi_k, v, state["kv"], state["z"], key_mask, name, self.eps, self.backend, log_decay, rows)
        return o.view(*phi_q.shape[:3], -1)
