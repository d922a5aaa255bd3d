"""What reading a context asks of ids and masks."""

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError


def check_ids(argument: str, ids: object) -> Tensor:
    """Return ids of tokens; raise ArgumentTypeError where a value is no tensor of such."""
    found = check_tensor(argument, ids)
    if found.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(argument, "be int64 or int32", found.dtype, "Pass the ids that a tokenizer gave.")
    return found


def check_tensor(argument: str, value: object) -> Tensor:
    """Return a value; raise ArgumentTypeError where it is no tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            argument, "be a tensor", type(value).__name__, "Tokenise with return_tensors='pt', or use torch.tensor."
        )
    return value


def left_padded(mask: Tensor, ids: Tensor) -> Tensor:
    """Return the mask of texts ``[B, T]`` as int64, if it is padded on the left.

    Raises:
        ArgumentTypeError: If it is no tensor.
        ArgumentError: If it has another shape than the ids, other values than 0 and 1, or padding elsewhere.
    """
    if check_tensor("attention_mask", mask).shape != ids.shape:
        rule = f"have the shape [B, T] = {tuple(ids.shape)} of input_ids"
        remedy = "Pass the one that the tokenizer gave with them."
        raise ArgumentError("attention_mask", rule, tuple(mask.shape), remedy)
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        remedy = "Pass the one that the tokenizer gave."
        raise ArgumentError("attention_mask", "be 1 for a real token and 0 for padding", other[0].item(), remedy)
    ends = (mask.long().diff(dim=1) < 0).any(1).nonzero().flatten().tolist()
    if ends:
        where = "on the right" if not mask[ends[0], -1] else "between its tokens"
        rule, remedy = "be padded on the left", "Tokenise with padding_side='left'."
        raise ArgumentError("attention_mask", rule, f"padding {where}", remedy, where=f"row {ends[0]}")
    return mask.long()
