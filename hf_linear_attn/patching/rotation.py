"""How a model applies RoPE to its queries and keys: found by running an attention module with known cos and sin."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.rotation import LAYOUTS, STILL, Layout, Rotation

ARGUMENT = "position_embeddings"
"""What attention modules call the cosines and sines that a model hands them."""

HINTS = ("rotary", "rope", "sinusoidal", "freqs")
"""Words in the source of a module that may rotate by itself."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Largest error of a layout, relative to the tokens' norm, by their dtype: a model may multiply in 16 bits what is
checked in fp32."""

TOKENS = 64
"""Tokens that a layout is checked on."""


class UnknownRotationError(UnsupportedError):
    """It cannot be told how a layer rotates its queries and keys."""


Angles = tuple[Tensor, Tensor]
Look = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]


def has_values(x: Tensor) -> bool:
    """Tell whether a tensor has numbers, and not only a shape."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def is_rotated(module: nn.Module, name: str) -> bool:
    """Tell whether an attention module is handed a rotation.

    Raises:
        UnknownRotationError: If it applies one of its own, which cannot be seen from outside.
    """
    takes, source = _forward_of(type(module))  # type: ignore[arg-type]  # classes are hashable
    if takes:
        return True
    if any(word in source for word in HINTS):
        raise _unknown(name, f"{type(module).__name__} speaks of a rotation that it is not handed")
    return False


@cache
def _forward_of(cls: Callable[..., nn.Module]) -> tuple[bool, str]:
    """Return whether a class's forward takes a rotation, and its source."""
    forward = inspect.unwrap(cast(type[nn.Module], cls).forward)
    return ARGUMENT in inspect.signature(forward).parameters, inspect.getsource(forward).lower()


def rotation_in(args: tuple[Any, ...]) -> Any:
    """Return what a module is told of its rotation, among arguments without names; None where it is not."""
    return next((x for x in args if _is_rotation(x)), None)


def angles_of(name: str, told: Any) -> Angles:
    """Return the cosines and sines ``[B or 1, T, *]`` that a layer is told.

    Raises:
        UnknownRotationError: If they have another form.
    """
    if not _is_rotation(told):
        raise _unknown(name, f"`{ARGUMENT}` is a {type(told).__name__}")
    cos, sin = (told.real, told.imag) if isinstance(told, Tensor) else told
    if cos.ndim == 4 and cos.shape[1] == 1:
        cos, sin = cos[:, 0], sin[:, 0]
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    if cos.ndim != 3:
        raise _unknown(name, f"angles have the shape {tuple(cos.shape)}")
    return cos, sin


def _is_rotation(value: Any) -> bool:
    """Tell whether an argument is a pair of cosines and sines, or both as complex numbers."""
    if isinstance(value, Tensor):
        return value.is_complex()
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    cos, sin = value
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.shape != sin.shape:
        return False
    return cos.is_floating_point() and sin.is_floating_point()


def with_angles(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], cos: Tensor, sin: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with other cosines and sines, in the form of its own."""

    def other(value: Any) -> Any:
        if not _is_rotation(value):
            return value
        if isinstance(value, Tensor):
            return torch.complex(cos.contiguous(), sin.contiguous()).reshape(value.shape)
        return cos.reshape(value[0].shape), sin.reshape(value[0].shape)

    if kwargs.get(ARGUMENT) is not None:
        return args, {**kwargs, ARGUMENT: other(kwargs[ARGUMENT])}
    place = next(n for n, x in enumerate(args) if _is_rotation(x))
    return (*args[:place], other(args[place]), *args[place + 1 :]), dict(kwargs)


def find_layout(name: str, look: Look, angles: Angles, *, shares_keys: bool) -> Layout | None:
    """Find out how a module rotates, from what it makes of angles that are drawn and of none.

    ``look`` returns the module's queries and keys for cosines and sines, None where it does not show them; ``angles [B
    or 1, T, *]`` are those of the tokens. Where the module ``shares_keys``, they are another layer's.

    Returns:
        The layout, with which the drawn rotation gives the module's queries and keys to rounding, and which undoes
        rotations by the model's own angles; None where all queries and keys are 0 or not finite, so that
        nothing can be told.

    Raises:
        UnknownRotationError: If there is none.
    """
    cos, sin = angles
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(cos.shape, generator=generator).to(cos) for _ in range(2)]
    before, after = look(torch.ones_like(cos), torch.zeros_like(sin)), look(*drawn)
    if before is None or after is None:
        raise _unknown(name, "its queries and keys are not seen")
    if not has_values(before[0]):
        return None
    if before[0].shape[2] != cos.shape[1]:
        raise _unknown(name, f"there are angles for {cos.shape[1]} tokens, and {before[0].shape[2]} queries")
    pairs = [_finite(x, y) for x, y in zip(before, after, strict=True)][: 1 if shares_keys else 2]
    pairs = [(x, y) for x, y in pairs if bool(x.any())]
    tokens = _telling(pairs)
    if not len(tokens):
        return None
    pairs = [(x[:, :, tokens], y[:, :, tokens]) for x, y in pairs]
    cos, sin, drawn_cos, drawn_sin = (x[:, tokens] for x in (cos, sin, *drawn))
    if all(_equal(x, y) for x, y in pairs):
        return STILL
    for layout in LAYOUTS:
        if not all(_fits(layout, x, drawn_cos) for x, _ in pairs):
            continue
        if not all(_equal(_turned(layout, x, drawn_cos, drawn_sin), y) for x, y in pairs):
            continue
        # There and back is the same, if the model's own angles are a rotation's.
        own, exact = Rotation.of(cos, sin, layout), [x.float() for x, _ in pairs]
        if not all(_equal(own.undo(_turned(layout, x, cos, sin)), x) for x in exact):
            raise _unknown(name, "its angles are no rotation's")
        return layout
    raise _unknown(name, "no known rotation makes what the layer does to queries and keys")


def _fits(layout: Layout, x: Tensor, cos: Tensor) -> bool:
    """Tell whether there are angles for the tokens, and entries for the angles."""
    batch, tokens, width = layout.by_entry(cos).shape
    return batch in (1, x.shape[0]) and tokens == x.shape[2] and width <= x.shape[3] and width % 2 == 0


def _turned(layout: Layout, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys as a model does, every entry by its own angle."""
    cos, sin = (upcast(layout.by_entry(y))[:, None] for y in (cos, sin))
    width = cos.shape[-1]
    still = x.shape[-1] - width
    moved = upcast(x[..., still:] if layout.at_end else x[..., :width])
    a, b = layout.pairs_of(moved)
    moved = (moved * cos + layout.whole(-b, a) * sin).to(x.dtype)
    return torch.cat([x[..., :still], moved] if layout.at_end else [moved, x[..., width:]], -1)


def _finite(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries or keys with zeros for the tokens that are not finite in both."""
    broken = ~(x.isfinite() & y.isfinite()).all(-1, keepdim=True)
    return x.masked_fill(broken, 0), y.masked_fill(broken, 0)


def _telling(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the places of a few tokens that are not 0 in all rows and heads: of padding, say, nothing can be told."""
    if not pairs:
        return torch.empty(0, dtype=torch.long)
    sizes = torch.stack([x.float().abs().amax((0, 1, 3)) for x, _ in pairs]).amin(0)
    largest, places = sizes.topk(min(TOKENS, len(sizes)))
    return places[largest > 0]


def _equal(x: Tensor, y: Tensor) -> bool:
    wide = torch.promote_types(y.dtype, torch.float32)
    return bool((x.to(wide) - y.to(wide)).norm() <= TOLERANCE[y.dtype] * y.to(wide).norm())


def _unknown(name: str, reason: str) -> UnknownRotationError:
    return UnknownRotationError(
        "rotary",
        "be 'keep' or 'auto' where it cannot be told how queries and keys are rotated",
        "undo",
        f"Here {reason}: say so, or leave this layer out with layers=.",
        where=name,
    )
