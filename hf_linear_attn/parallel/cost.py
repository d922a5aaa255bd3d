"""What ranks send each other, as a formula."""

from math import prod
from typing import NamedTuple

import torch

from hf_linear_attn.layers import LinearAttention


class Sent(NamedTuple):
    """Bytes that each rank sends for one layer, in a forward; a backward sends as many, of kept keys no more.

    Attributes:
        states: What context parallelism sends, whatever the length of the text.
        keys: What handing round all keys and values would.
    """

    states: int
    keys: int


def bytes_sent(
    layer: LinearAttention,
    ranks: int,
    tokens: int,
    *,
    rows: int = 1,
    token_bytes: int = 4,
    turned: int | None = None,
) -> Sent:
    """Count the bytes that each rank sends for one layer in a forward.

    With HKV key heads of D entries, values of V, F features, a window W and N sinks::

        (P - 1) * rows * (HKV * (F V + F + D + (W + N) (D + V)) + W R) * 4

    of which ``F V + F`` are the state (none with ``mix="window"``), the single D the sum of keys (``mix="key"`` alone),
    and R the angles of a token, where the rotation of R entries is undone beside a window. Update rules that overwrite
    send ``F V + F F`` in place of the state, and those that only fade one number more. Each rank but the last hands on
    C kept keys with their values, and what the choice among them goes by, ``rows HKV C (D + V)`` entries and 12 or 32
    bytes a key.

    Args:
        layer: A converted layer.
        ranks: P.
        tokens: Tokens of a text, on all ranks.
        rows: Texts in a batch.
        token_bytes: Bytes of an entry of a key; sums and what travels with them are fp32.
        turned: R, entries of a head that the model turns by a token's place; None for all.
    """
    head_dim, value_dim, kv_heads = layer.sizes.head_dim, layer.sizes.values, layer.sizes.num_kv_heads
    # What a layer turns is known once it has been called.
    turned = head_dim if turned is None else turned
    numbers = 0
    if layer.has_far:
        features, rule = layer.feature_map.feature_dim, layer.settings.update_rule
        numbers += features * (value_dim + (features if "delta" in rule else 1)) + (rule == "decay")
    if layer.window is not None:
        numbers += head_dim if layer.mix.sums_keys else 0
        numbers += (layer.window.size + layer.window.sinks) * (head_dim + value_dim)
    turns = layer.window.size * turned if layer.window is not None and layer.undoes else 0
    most, kept = -(-tokens // ranks), 0
    if layer.kept is not None and ranks > 1:
        for slot in layer.kept.slots(value_dim).values():
            kept += prod(slot.shape) * (token_bytes if slot.kind == "token" else slot.dtype(torch.float32).itemsize)
    return Sent(
        states=(ranks - 1) * rows * (kv_heads * numbers + turns) * 4 + rows * kept,
        keys=(ranks - 1) * rows * kv_heads * most * (head_dim + value_dim) * token_bytes,
    )
