"""Models and batches, and the comparison of several ranks with one process."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn import patch_model
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.parallel import ContextParallel
from hf_linear_attn.patching.call_cache import returned_cache
from tests.distill.tiny import tiny_teacher

_conversion = DistillationSettings().conversion
RECOMMENDED = {name: getattr(_conversion, name) for name in ("feature_map", "mix", "rotary", "update_rule")}
"""The recommended recipe, with a window that short texts are longer than."""
RECOMMENDED |= {"window": 8, "sinks": 2}


class Found(NamedTuple):
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    cache: list[dict[str, Tensor]]


def model_of(dtype: torch.dtype = torch.float32, **patch: Any) -> torch.nn.Module:
    model = patch_model(tiny_teacher().to(dtype), **patch)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        # Mixing weights and maps begin at special values.
        p.data += 0.05 * torch.randn(p.shape, generator=generator).to(dtype)
    return model


def batch_of(rows: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 259, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def padded(batch: dict[str, Tensor], pads: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Hide tokens at the beginning and the end of each row."""
    mask = torch.ones_like(batch["input_ids"])
    for row, (left, right) in enumerate(pads):
        mask[row, :left] = 0
        mask[row, mask.shape[1] - right :] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def packed(batch: dict[str, Tensor], documents: list[list[int]]) -> dict[str, Tensor]:
    return batch | {"position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])}


def run(model: torch.nn.Module, batch: dict[str, Tensor], *, use_cache: bool = False) -> Found:
    model.zero_grad()
    out = model(**batch, use_cache=use_cache)
    out.loss.backward()
    layers = returned_cache(out).layers if use_cache else []
    return Found(out.logits.detach(), out.loss.detach(), gradients(model), [layer.state.read() for layer in layers])


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def run_part(
    context: ContextParallel, batch: dict[str, Tensor], lengths: list[int] | None = None, *, use_cache: bool = False
) -> Found:
    found = run(context.model, context.split(batch, lengths), use_cache=use_cache)
    context.sum_gradients()
    return found._replace(loss=context.sum(found.loss), gradients=gradients(context.model))


def close(found: Tensor, expected: Tensor, tol: float, what: str = "logits") -> None:
    """Compare to ``tol`` of the largest entry: sums cancel, and are as exact as what they are made of."""
    largest = 0.0 if expected.dtype == torch.bool or not expected.numel() else expected.abs().max().item()
    torch.testing.assert_close(
        found, expected, atol=tol * max(1.0, largest), rtol=tol, msg=lambda message: f"{what}: {message}"
    )


def compare(
    one: Found, part: Found, context: ContextParallel, batch: dict[str, Tensor], lengths: Any, tol: float
) -> None:
    """Compare one rank's part with the whole: logits, loss, gradients, and on the last rank the cache."""
    tokens = batch["input_ids"].shape[1]
    lengths = lengths or context.lengths(tokens)
    start = sum(lengths[: context.rank])
    own = slice(start, start + lengths[context.rank])
    # What padding attends to is nobody's business.
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, own].bool()
    close(part.logits[real], one.logits[:, own][real], tol)
    # Transformers makes losses in fp32.
    torch.testing.assert_close(part.loss, one.loss, atol=max(tol, 1e-5), rtol=0)
    for name, expected in one.gradients.items():
        close(part.gradients[name], expected, tol, name)
    if context.rank == context.size - 1:
        for mine, whole in zip(part.cache, one.cache, strict=True):
            assert mine.keys() == whole.keys()
            for name, expected in whole.items():
                close(mine[name], expected, tol, name)
