"""Settings of a patched model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

from hf_linear_attn.checks import check_eps, check_type, check_types
from hf_linear_attn.errors import ArgumentError, CheckpointError, HFLinearAttnError

FORMAT_VERSION = 1
"""Version of the settings and tensors that a saved model carries; raised when older code could not read them."""


LATER = {
    "update_rule": "additive",
    "rotary": "keep",
    "kept": 0,
    "retention": "redundancy",
    "retention_units": 64,
    "per_layer": {},
}
"""Settings that older code does not know, with what it does: they are written only where they say something else."""

ALIASES = {"linear": "additive", "gated": "decay"}
"""Other words for update rules, those of ONNX's LinearAttention operator."""

_checks: list[Callable[["LinearAttentionConfig"], None]] = []


def check_with(function: Callable[["LinearAttentionConfig"], None]) -> None:
    """Let a function refuse settings when a config is made: what knows the rules is above this module."""
    _checks.append(function)


LONGEST_WINDOW = 2**20
"""Most tokens of a window, or of sinks: every layer and row keeps memory for as many, whatever it has read."""

PER_LAYER = ("window", "kept")
"""Settings that a layer may have of its own."""

MOST_UNITS = 2**12
"""Most units of a learned rule's net."""

MOST_KEPT = 2**16
"""Most keys that are kept beyond a window: every token that leaves it is compared with all of them."""

Backend = Literal["auto", "reference", "torch", "triton", "numba"]
Rotary = Literal["keep", "undo", "auto"]


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Say how attention layers are converted.

    Args:
        feature_map: A registered name, see :func:`available_feature_maps`.
        feature_map_options: The map's own settings.
        layers: Which attention layers are converted, as indices among the model's self-attention layers in the order
            of ``named_modules()``; None stands for every full-attention layer.
        window: Attend exactly to the last ``window`` tokens, the query's own included, and linearly to the rest; None
            for linear attention throughout. 1..1048576.
        sinks: Attend exactly to the first ``sinks`` tokens too; needs a window. 0..1048576.
        kept: Attend exactly, too, to as many keys of each key head among those that have left the window; needs a
            window. What leaves the window is kept, and once there are so many, one goes: into the linear branch, or
            with ``mix="window"`` for good. 0..65536.
        retention: Which of the kept keys goes. ``"redundancy"``: the one whose value a later one has come closest to;
            nothing is learned. ``"learned"``: the one with the least score for its age, which is made of keys and
            values when it leaves the window, and learned from the teacher's attention.
        retention_units: Units of the net that makes those scores, for each key head; other rules have none. 1..4096.
        per_layer: What single layers have in place of ``window`` and ``kept``, where all have any, by their indices:
            ``{1: {"window": 192, "kept": 192}}``. Layers need very different numbers of keys
            (docs/results/notebook.md).
        mix: How the exact and the linear branch are joined where there is a window. ``"key"``: the linear branch's
            normalised output is the value of one more key in the window's softmax, whose score is ``log n +
            scaling q.m + a + u.q`` for the mean m of the n keys beyond the window, and a, u learned per head.
            ``"gate"``: each is normalised, ``o = (1 - g) o_window + g o_linear`` with ``g = sigmoid(a + u.q)``.
            ``"shared"``: one denominator, as LoLCATs (Zhang et al., 2024, arXiv:2410.10254). ``"window"``: no linear
            branch at all, the baseline that a conversion has to beat.
        update_rule: How the linear branch's state takes in keys. ``"additive"``: ``S += phi(k) v^T``, normalised by the
            sum of ``phi(k)``. ``"decay"``: the same sums, fading with every key by a factor learned from it and its
            value. ``"delta"``: features of length 1, and a key replaces a learned share of what stands at it; no
            normaliser. ``"gated_delta"``: both. All but the first are for causal attention. ``"linear"`` and
            ``"gated"`` stand for the first two.
        rotary: How the linear branch reads queries and keys that the model rotates by their positions: ``"keep"``, as
            they are; ``"undo"``, with the rotation undone, so that feature maps know nothing of positions and none is
            new to them. Window and sinks read them rotated, and so does the own key's score of ``mix="key"``; a window
            then holds its tokens' angles, too, once for all layers that turn alike. Models without a rotation have none
            to undo. ``"auto"``: undone beside a window wherever it can be told how a model rotates, and kept elsewhere;
            the patched model's config says which.
        eps: Added to the normaliser, 1e-37..1e37.
        backend: As in :func:`linear_attention`.
        allow_approximate: Drop what linear attention cannot honour (score soft-caps, attention biases, learned
            sinks, custom masks) instead of raising.
        trained_length: Tokens of the longest sequences that the converted model was trained on; None where unknown.
        format_version: Version of the saved form.

    Raises:
        ArgumentTypeError: If a value has another type than its setting; 16.0 is no whole number.
        ArgumentError: If a value is out of range.

    Example:
        >>> config = LinearAttentionConfig(feature_map="hedgehog", window=64, sinks=4)
        >>> LinearAttentionConfig.from_dict(config.to_dict()) == config
        True
    """

    feature_map: str = "elu"
    feature_map_options: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    window: int | None = None
    sinks: int = 0
    kept: int = 0
    retention: str = "redundancy"
    retention_units: int = 64
    per_layer: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    mix: str = "key"
    update_rule: str = "additive"
    rotary: str = "keep"
    eps: float = 1e-6
    backend: str = "auto"
    allow_approximate: bool = False
    trained_length: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "per_layer", _by_layer(self.per_layer))
        object.__setattr__(self, "feature_map_options", dict(self.feature_map_options))
        try:
            json.dumps(self.feature_map_options, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            rule, remedy = "be what JSON can say", "Give finite numbers, texts, and lists or mappings of them."
            raise ArgumentError("feature_map_options", rule, self.feature_map_options, remedy) from error
        object.__setattr__(self, "update_rule", ALIASES.get(self.update_rule, self.update_rule))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        if self.window is not None and self.window < 1:
            raise ArgumentError("window", "be at least 1 token, or None", self.window, "Use None for no window.")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise ArgumentError("sinks", "be >= 0, and 0 without a window", self.sinks, "Set window= too, or sinks=0.")
        if self.kept < 0 or (self.kept and self.window is None):
            raise ArgumentError("kept", "be >= 0, and 0 without a window", self.kept, "Set window= too, or kept=0.")
        if self.kept > MOST_KEPT:
            raise ArgumentError("kept", f"be at most {MOST_KEPT} keys", self.kept, "Lower it.")
        if not 1 <= self.retention_units <= MOST_UNITS:
            raise ArgumentError("retention_units", f"be 1 to {MOST_UNITS}", self.retention_units, "64 are many.")
        check_eps(self.eps)
        for name in ("window", "sinks"):
            if (getattr(self, name) or 0) > LONGEST_WINDOW:
                raise ArgumentError(name, f"be at most {LONGEST_WINDOW} tokens", getattr(self, name), "Lower it.")
        for name, kind, rule in (("backend", Backend, "be a known backend"), ("rotary", Rotary, "be a known choice")):
            if getattr(self, name) not in get_args(kind):
                raise ArgumentError(name, rule, getattr(self, name), "Use one of those", available=get_args(kind))
        if self.trained_length is not None and self.trained_length < 1:
            raise ArgumentError("trained_length", "be at least 1 token, or None", self.trained_length, "Correct it.")
        for check in _checks:
            check(self)
        for index, own in self.per_layer.items():
            for name in own:
                # What asks whether there is a window, or anything kept, asks the settings of all.
                if not getattr(self, name):
                    remedy = f"Set {name}= too; layers that need fewer are named here."
                    raise ArgumentError("per_layer", f"hold no `{name}` where the model has none", own, remedy)
            self.of_layer(index)

    def of_layer(self, index: int) -> Self:
        """Return the settings of one layer, by its index among the model's self-attention layers.

        Raises:
            ArgumentError: If what it has of its own is out of range.
        """
        own: dict[str, Any] = dict(self.per_layer.get(index, {}))
        try:
            return replace(self, per_layer={}, **own)
        except ArgumentError as error:
            rule = f"hold what layer {index} can have"
            raise ArgumentError("per_layer", rule, own, str(error)) from error

    @property
    def longest_window(self) -> int:
        """The largest ``window`` of any layer; 0 without one."""
        return max([self.window or 0, *(own.get("window", 0) for own in self.per_layer.values())])

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        values = asdict(self)
        values["layers"] = None if self.layers is None else list(self.layers)
        values["per_layer"] = {str(index): own for index, own in values["per_layer"].items()}
        return {name: value for name, value in values.items() if name not in LATER or value != LATER[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read settings that :meth:`to_dict` wrote.

        Raises:
            CheckpointError: If they come from a newer version, lack settings or hold unknown ones, or values that no
                setting can have.
        """
        if not isinstance(values, Mapping):
            raise CheckpointError("linear_attention", "be a mapping of settings", values, "Save the model again.")
        version = values.get("format_version", 0)
        if not isinstance(version, int) or not 0 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                "format_version", f"be at most {FORMAT_VERSION}", version, "Update hf_linear_attn to read this model."
            )
        known = {f.name for f in fields(cls)}
        if unknown := [name for name in values if name not in known]:
            raise CheckpointError(
                "linear_attention", "hold known settings only", sorted(map(str, unknown)), "Remove those",
                available=known,
            )  # fmt: skip
        if lacking := sorted(known - LATER.keys() - values.keys()):
            rule = f"hold every setting of its format, version {FORMAT_VERSION}"
            raise CheckpointError("linear_attention", rule, f"none of the name {lacking[0]}", "Save the model again.")
        try:
            return cls(**values)
        except HFLinearAttnError as error:
            raise CheckpointError(str(error)) from error

    def to_json(self) -> str:
        """Return the settings as a JSON text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a text that :meth:`to_json` wrote.

        Raises:
            CheckpointError: If it is no JSON, or holds what :meth:`from_dict` refuses.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError("linear_attention", "be JSON", text, f"Reading it failed: {error}.") from error
        return cls.from_dict(values)


def _by_layer(given: Mapping[Any, Any]) -> dict[int, dict[str, int]]:
    """Return what layers have of their own, by index: JSON has texts for them."""
    found = {}
    for index, own in given.items():
        if not str(index).isdecimal():
            raise ArgumentError("per_layer", "hold indices of layers", index, "Count them from 0.")
        if not isinstance(own, Mapping) or not own or not own.keys() <= set(PER_LAYER):
            rule = f"hold some of {' and '.join(PER_LAYER)} for layer {index}"
            raise ArgumentError("per_layer", rule, own, 'Write {"window": 128}.')
        found[int(index)] = {name: check_type(f"per_layer[{index}].{name}", value, int) for name, value in own.items()}
    return dict(sorted(found.items()))
