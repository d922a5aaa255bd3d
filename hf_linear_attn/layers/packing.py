"""Packed texts, laid out side by side instead of end to end."""

from itertools import pairwise

import torch
from torch import Tensor

from hf_linear_attn.layers.call import Call, Layer


def packed(layer: Layer, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attend in texts that lie end to end in one row, those of like lengths as rows of one batch.

    Rows are filled up behind their ends, where no query of theirs looks, with their own last token: what is NaN in one
    text is in no other's products. Texts of one batch differ in length by less than a factor of two, so that less than
    half of it is filling.
    """
    if call.cu_seqlens is None:
        raise RuntimeError("there are no boundaries")
    alike: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(call.cu_seqlens.tolist()):
        if end > start:
            alike.setdefault((end - start - 1).bit_length(), []).append((start, end))
    alone = call._replace(cu_seqlens=None, key_mask=None)
    outputs, places = [], []
    for texts in alike.values():
        length = max(end - start for start, end in texts)
        first = torch.tensor([start for start, _ in texts], device=q.device)[:, None]
        last = torch.tensor([end for _, end in texts], device=q.device)[:, None]
        place = first + torch.arange(length, device=q.device)
        real = place < last
        at = torch.minimum(place, last - 1)
        rows = [x[0, :, at].transpose(0, 1) for x in (q, k, v)]
        mask = None if call.key_mask is None else call.key_mask[0, at] & real
        rotation = None if call.rotation is None else call.rotation.of_others(call.rotation.turns[0, at])
        own = alone._replace(key_mask=mask, rotation=rotation)
        outputs.append(layer.attend(rows[0], rows[1], rows[2], own).transpose(1, 2)[real])
        places.append(place[real])
    order = torch.cat(places).argsort()
    return torch.cat(outputs)[order].transpose(0, 1)[None]
