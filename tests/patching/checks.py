"""What must hold of every patched model, one function per property; each raises AssertionError with the figures.

The functions take a :class:`Subject`, and work on softmax models too: a property that the original does not have cannot
be asked of the patched one.
"""

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attn import from_pretrained, patch_model, unpatch_model
from hf_linear_attn.evaluation.meters import cache_bytes
from hf_linear_attn.patching import LinearAttention, is_patched
from hf_linear_attn.patching.call_cache import NAME, cache_of, returned_cache

from .zoo import VOCAB, Task

TOLERANCE = 2e-4
"""Largest difference, relative to the largest logit: fp32 sums in another order, through two layers of unit gain."""

LENGTH, SPLIT, NEW = 12, 7, 6

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"feature_map": "elu"},
    "learned": {"feature_map": "hedgehog"},
    "window": {"feature_map": "hedgehog", "window": 3, "sinks": 2},
    "kept": {"feature_map": "hedgehog", "window": 3, "sinks": 2, "kept": 3},
    "retained": {
        **{"feature_map": "elu", "window": 3, "sinks": 1, "rotary": "undo"},
        **{"kept": 3, "retention": "learned", "retention_units": 5},
        "per_layer": {1: {"window": 5, "kept": 2}},
    },
    "mixed": {"feature_map": "elu", "layers": [1]},
    "decay": {"feature_map": "elu", "window": 3, "sinks": 2, "update_rule": "decay"},
    "gated_delta": {"feature_map": "hedgehog", "window": 3, "sinks": 2, "update_rule": "gated_delta", "rotary": "undo"},
}
"""Conversions of a language model, by name."""


def some(*names: str) -> dict[str, dict[str, Any]]:
    """Return some of :data:`SETTINGS`."""
    return {name: SETTINGS[name] for name in names}


def prompt(tokens: int, seed: int = 0, rows: int = 1) -> Tensor:
    """Draw token ids that are no special tokens."""
    return torch.randint(5, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def left_padding(ids: Tensor, tokens: int) -> Tensor:
    """Return the mask of texts of which the second begins with so many tokens of padding."""
    mask = torch.ones_like(ids)
    mask[1, :tokens] = 0
    return mask


@dataclass
class Subject:
    """A model under test and how to call it."""

    model: PreTrainedModel
    task: Task

    def tokens(self, length: int = LENGTH, seed: int = 0, rows: int = 2) -> Tensor:
        """Return what :func:`prompt` does."""
        return prompt(length, seed, rows)

    def logits(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Run the decoder over ``ids`` (the encoder, for masked models)."""
        if self.task == "seq2seq" and "encoder_outputs" not in kwargs:
            kwargs = {"input_ids": self.tokens(9, seed=1)[: len(ids)], "decoder_input_ids": ids, **kwargs}
        elif self.task == "seq2seq":
            kwargs["decoder_input_ids"] = ids
        else:
            kwargs["input_ids"] = ids
        with torch.no_grad():
            return self.model(**kwargs).logits

    def generate(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Generate ``NEW`` tokens; return only those."""
        kwargs = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "num_beams": 1} | kwargs
        with torch.no_grad():
            return self.model.generate(ids, **kwargs)


def patched(model: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    """Patch a model, and let the gates of its update rule, which start alike for all keys, tell keys apart."""
    patch_model(model, **settings)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".rule_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def close(a: Tensor, b: Tensor, what: str) -> None:
    """Assert that two tensors of logits agree."""
    error = (a - b).abs().max() / b.abs().max()
    assert error < TOLERANCE, f"{what}: relative error {error:.1e}"


def grads_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients that a model has, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def loss_and_gradients(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a model, compiled or not, that predicts its own inputs, and copies of its gradients."""
    module = getattr(model, "_orig_mod", model)
    module.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    return loss.detach(), copy.deepcopy(grads_of(module))


def same_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Assert that two models have gradients of the same parameters, and that they agree."""
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@contextmanager
def cache_sizes(model: PreTrainedModel) -> Iterator[list[int]]:
    """Collect the bytes that a model's cache holds after the first layer of each forward."""
    held: list[int] = []
    hook = model.model.layers[0].register_forward_hook(
        lambda module, args, kwargs, output: held.append(cache_bytes(cache_of(kwargs, args))), with_kwargs=True
    )
    yield held
    hook.remove()


class Graphs(list[Any]):
    """A compiler backend that collects what it is given and runs it as it is."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Collect a graph, and return what runs it."""
        self.append(graph)
        return graph.forward


def causality(subject: Subject) -> None:
    """Later tokens do not change earlier logits, and do change later ones."""
    ids = subject.tokens()
    other = ids.clone()
    other[:, SPLIT:] = subject.tokens(seed=2)[:, SPLIT:]
    a, b = subject.logits(ids, use_cache=False), subject.logits(other, use_cache=False)
    close(a[:, :SPLIT], b[:, :SPLIT], "earlier logits after a change of later tokens")
    assert not torch.allclose(a[:, -1], b[:, -1]), "later logits do not depend on later tokens"


def bidirectionality(subject: Subject) -> None:
    """The last token changes the first logits."""
    ids = subject.tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] - 4) % (VOCAB - 5) + 5
    change = (subject.logits(ids) - subject.logits(other))[:, 0].abs().max()
    assert change > 1e-5, f"the first logits change by {change:.1e}"


def _cached(subject: Subject, pieces: list[int]) -> None:
    ids = subject.tokens()
    whole = subject.logits(ids, use_cache=False)
    more: dict[str, Any] = {}
    if subject.task == "seq2seq":
        with torch.no_grad():
            more["encoder_outputs"] = subject.model.get_encoder()(subject.tokens(9, seed=1))
    parts = []
    for piece in ids.split(pieces, dim=1):
        kwargs = {"decoder_input_ids" if subject.task == "seq2seq" else "input_ids": piece}
        with torch.no_grad():
            output = subject.model(**kwargs, **more, use_cache=True)
        more[NAME] = returned_cache(output)
        parts.append(output.logits)
    close(torch.cat(parts, 1), whole, f"pieces of {pieces} tokens against one pass")


def cached_decoding(subject: Subject) -> None:
    """Token by token with a cache equals one pass."""
    _cached(subject, [1] * LENGTH)


def chunked_prefill(subject: Subject) -> None:
    """A prefill in two pieces equals one pass."""
    _cached(subject, [SPLIT, LENGTH - SPLIT])


def greedy(subject: Subject) -> None:
    """Greedy generation with a cache equals that without."""
    ids = subject.tokens(SPLIT)
    a, b = (subject.generate(ids, use_cache=cached) for cached in (True, False))
    assert torch.equal(a, b), f"{a.tolist()} with a cache, {b.tolist()} without"


def beams(subject: Subject) -> None:
    """Beam search with a cache equals that without."""
    ids = subject.tokens(SPLIT)
    a, b = (subject.generate(ids, use_cache=cached, num_beams=3) for cached in (True, False))
    assert torch.equal(a, b), f"{a.tolist()} with a cache, {b.tolist()} without"


def padding(subject: Subject) -> None:
    """A padded row equals the row alone: on the left in decoders, on the right in encoders."""
    ids = subject.tokens()
    short = ids[1:, -SPLIT:]
    mask = torch.ones_like(ids)
    if subject.task == "causal":
        mask[1, :-SPLIT] = 0
        padded = ids * mask
        kwargs = {"return_dict_in_generate": True, "output_logits": True}
        together = subject.generate(padded, attention_mask=mask, **kwargs)
        alone = subject.generate(short, attention_mask=torch.ones_like(short), **kwargs)
        # A shared prefix is enough: beyond it, rounding may tip an argmax.
        for step, (a, b) in enumerate(zip(together.logits, alone.logits, strict=True)):
            close(a[1:], b, f"left-padded row at new token {step}")
        return
    padded = torch.cat([short, torch.zeros(1, LENGTH - SPLIT, dtype=torch.long)], 1)
    both = torch.cat([ids[:1], padded])
    mask[1, SPLIT:] = 0
    if subject.task == "masked":
        a = subject.logits(both, attention_mask=mask)[1:, :SPLIT]
        close(a, subject.logits(short, attention_mask=torch.ones_like(short)), "right-padded row")
    else:
        target = subject.tokens(seed=3)
        a = subject.logits(target, input_ids=both, attention_mask=mask)[1:]
        close(a, subject.logits(target[1:], input_ids=short, attention_mask=torch.ones_like(short)), "padded source")


def save_and_load(subject: Subject) -> None:
    """A saved model loads with the same logits, and nothing missing or left over."""
    ids = subject.tokens()
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        load = from_pretrained if is_patched(subject.model) else type(subject.model).from_pretrained
        loaded, info = load(folder, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], f"{problem}: {sorted(info[problem])[:3]}"
    again = Subject(loaded.eval(), subject.task).logits(ids)
    close(again, subject.logits(ids), "logits after loading")


DECODER_CHECKS: tuple[Callable[[Subject], None], ...] = (
    causality,
    cached_decoding,
    chunked_prefill,
    greedy,
    padding,
    beams,
)
ENCODER_CHECKS: tuple[Callable[[Subject], None], ...] = (bidirectionality, padding)


def checks_for(task: Task) -> tuple[Callable[[Subject], None], ...]:
    """List the properties that softmax models have too."""
    return ENCODER_CHECKS if task == "masked" else DECODER_CHECKS


def differs_and_unpatches(build: Callable[[], PreTrainedModel], task: Task, **settings: Any) -> None:
    """Patching changes the logits to other finite ones; unpatching restores bits; a second model is left alone."""
    subject, beside = Subject(build(), task), Subject(build(), task)
    model, ids = subject.model, subject.tokens()
    before = subject.logits(ids)
    names, cls = {k: v.clone() for k, v in model.state_dict().items()}, type(model)
    config = copy.deepcopy(model.config).to_dict()
    patch_model(model, **settings)
    signatures(type(model), cls)
    after = subject.logits(ids)
    assert after.isfinite().all(), "logits are not finite"
    assert (after - before).abs().max() > 1e-3 * before.abs().max(), "patching changes nothing"
    assert torch.equal(beside.logits(ids), before), "patching changed another model of the class"
    unpatch_model(model)
    assert torch.equal(subject.logits(ids), before), "logits are not restored"
    restored = model.state_dict()
    assert list(restored) == list(names), "names of weights are not restored"
    assert all(torch.equal(restored[k], names[k]) for k in names), "weights are not restored"
    assert type(model) is cls, "the class is not restored"
    assert model.config.to_dict() == config, "the config is not restored"


def signatures(cls: type, base: type) -> None:
    """What a patched class is called with is what the class that it stands for is called with."""
    for name in ("from_pretrained", "generate", "forward", "save_pretrained", "__init__"):
        if hasattr(base, name):
            found, expected = (inspect.signature(getattr(owner, name)) for owner in (cls, base))
            assert found == expected, f"the signature of {name} is {found}, not {expected}"


def gradients(model: PreTrainedModel, task: Task) -> None:
    """A gradient reaches every parameter of every converted layer."""
    subject = Subject(model, task)
    ids = subject.tokens()
    kwargs = (
        {"decoder_input_ids": ids, "input_ids": subject.tokens(9, seed=1)} if task == "seq2seq" else {"input_ids": ids}
    )
    logits = model(**kwargs).logits
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).mean().backward()
    parts = [m for m in model.modules() if isinstance(m, LinearAttention)]
    assert parts, "nothing is patched"
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, f"no gradient reaches {part.name}.{name}"
            assert parameter.grad.isfinite().all(), f"the gradient of {part.name}.{name} is not finite"
            assert parameter.grad.abs().max() > 0, f"the gradient of {part.name}.{name} is zero"
