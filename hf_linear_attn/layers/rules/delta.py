"""The delta rule: a key replaces what stands at it."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.layers.rules.base import Reading, Rule, RuleCall, RuleStep, Sizes
from hf_linear_attn.layers.rules.gates import BETA_START, Gates, betas, gate_weights
from hf_linear_attn.layers.state import Slot
from hf_linear_attn.ops import DeltaRuleState, delta_rule
from hf_linear_attn.ops.delta_rule.step import delta_opaque_, delta_plain_, overwrite_and_read_


class Delta(Rule):
    """Compute ``o = c S^T q``, ``S += beta k (v - S^T k)^T`` for features q and k of length 1.

    ``beta = sigmoid(b + u.k + w.v)`` is learned per key head, the scale c per query head, 1 at the start: there is no
    normaliser (Schlag et al., 2021, arXiv:2102.11174; Yang et al., 2024, arXiv:2406.06484).
    """

    name: ClassVar[str] = "delta"
    steps: ClassVar[bool] = True
    steps_rows: ClassVar[bool] = True
    ordered: ClassVar[bool] = True
    maps: ClassVar[bool] = False

    @override
    def weights(self, sizes: Sizes) -> dict[str, Tensor]:
        gate = gate_weights("beta", BETA_START, sizes.num_kv_heads, sizes.head_dim, sizes.values)
        return gate | {"scale": torch.ones(sizes.num_heads)}

    @override
    def gates(self, k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Gates:
        return Gates(beta=betas(k, v, weights), scale=weights["scale"])

    @override
    def slots(self, kv_heads: int, feature_dim: int, value_dim: int, copies: int | None = None) -> dict[str, Slot]:
        return {"kv": Slot((kv_heads, feature_dim, value_dim))}

    @override
    def read(self, call: RuleCall, state: Mapping[str, Tensor] | None) -> Reading:
        beta, scale = _needed(call.gates)
        o, final = delta_rule(
            call.phi_q,
            call.phi_k,
            call.v.to(call.phi_k.dtype),
            beta,
            call.gates.log_decay if call.gates is not None else None,
            key_mask=call.key_mask,
            cu_seqlens=call.cu_seqlens,
            state=None if state is None else DeltaRuleState(state["kv"]),
            delay=call.delay,
            backend=self.backend,
        )
        return Reading((o * scale.to(o.dtype)[:, None, None]).to(call.v.dtype), {"kv": final.kv})

    @override
    def step_(self, step: RuleStep, state: Mapping[str, Tensor]) -> Tensor:
        phi_q, phi_k, v, gates, _, key_mask, _, rows, kernels = step
        beta, scale = _needed(gates)
        log_decay, kv = None if gates is None else gates.log_decay, state["kv"]
        if kernels:
            overwrite = delta_opaque_ if torch.compiler.is_compiling() else delta_plain_
            q = phi_q.flatten(1, 2)[:, :, None]
            o = overwrite(q, phi_k, v.to(phi_k.dtype), beta, log_decay, kv, key_mask, True, self.backend, rows)
            o = o.view(*phi_q.shape[:3], -1)
        else:
            o = overwrite_and_read_(phi_q, phi_k, v, beta, log_decay, kv, key_mask, True)
        return o * scale.to(o.dtype).view(*phi_q.shape[1:3], 1)


def _needed(gates: Gates | None) -> tuple[Tensor, Tensor]:
    """Return the betas and the scale."""
    if gates is None or gates.beta is None or gates.scale is None:
        raise RuntimeError("the gates of this rule were not computed")
    return gates.beta, gates.scale
