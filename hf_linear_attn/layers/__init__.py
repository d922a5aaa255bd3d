"""What a converted layer computes: an update rule, a window and a mixing rule around a feature map; torch only."""

from hf_linear_attn.config import LinearAttentionConfig, check_with
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers.attention import LinearAttention, Shard
from hf_linear_attn.layers.call import Branch, Call
from hf_linear_attn.layers.mixes import MIXES
from hf_linear_attn.layers.registry import lookup
from hf_linear_attn.layers.retention import RETENTIONS
from hf_linear_attn.layers.rules import RULES, Sizes
from hf_linear_attn.layers.state import Common, Slot, State

__all__ = [
    "Branch",
    "Call",
    "Common",
    "LinearAttention",
    "LinearAttentionConfig",
    "Shard",
    "Sizes",
    "Slot",
    "State",
    "check_parts",
]


def check_parts(config: LinearAttentionConfig) -> None:
    """Refuse rules that there are not, and those that do not fit together.

    Raises:
        ArgumentError: Naming the rule and what it needs.
    """
    mix, rule = lookup("mix", config.mix, MIXES), lookup("update_rule", config.update_rule, RULES)
    if not mix.has_far and config.window is None:
        raise ArgumentError("mix", "come with a window", config.mix, "Set window=.")
    lookup("retention", config.retention, RETENTIONS)
    if missing := mix.needs - rule.provides if config.window is not None else None:
        raise ArgumentError(
            "mix",
            f"be one that needs no {', '.join(sorted(missing))}, which update_rule={config.update_rule!r} has not",
            config.mix,
            "Use one of those",
            available=[name for name, cls in MIXES.items() if cls.needs <= rule.provides],
        )


check_with(check_parts)
