"""Rotary positions and kinds of layers in config.json, as transformers 4 and 5 name them.

Served are the variants whose angles do not depend on the length of the sequence; others are refused by name. The angles
of longrope do: sequences up to the length before its extension have one set of factors, longer ones another. The first
set is served, so that no sequence is longer. Source: Ding et al. 2024, arXiv:2402.13753, as transformers computes it.
Kinds of attention layers, each with positions of its own, have the names of transformers since Gemma 2 and ModernBERT.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    Json,
    check_fields,
    is_causal,
    read_flag,
    read_int,
    read_layers,
    read_number,
    show,
)

# Fields of each variant beside its type and rope_theta.
_FIELDS_OF_TYPE = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}


_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
# Their table is computed: no tensor of a checkpoint limits it.
_MOST_POSITIONS = 1 << 24


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor`; 1 is no scaling."""

    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones unchanged, those between interpolated.

    Attributes:
        low, high: rotations over `positions` below and above which a frequency is low or high.
        positions: length of the sequences before the extension, in tokens.
    """

    factor: float
    low: float
    high: float
    positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies divided by `factor` along a ramp over the features, and larger scores.

    Attributes:
        beta_fast, beta_slow: rotations over `positions` at which the ramp begins and ends.
        positions: length of the sequences before the extension, in tokens.
        is_truncated: whether the ends of the ramp are rounded to whole features.
        attention_factor: multiplies cosines and sines; None derives it from `factor` and the two scales.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    positions: int
    is_truncated: bool
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own.

    Attributes:
        attention_factor: multiplies cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float


Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary positions of a model.

    Attributes:
        positions: longest sequence that it serves, in tokens.
        share: part of the features of a head that rotates, the first ones.
    """

    theta: float
    scaling: Scaling
    positions: int
    share: float = 1.0

    def rotated(self, dim: int) -> int:
        """Return the number of features that rotate, of `dim` features of a head."""
        return int(dim * self.share)


def read_rotary(
    config: Json,
    *,
    default_theta: float = 10_000.0,
    dim: int | None = None,
    is_partial: bool = False,
) -> RotaryConfig:
    """Return the rotary positions of a config.json.

    Args:
        default_theta: the base of the frequencies where the file has none.
        dim: features of a head, of a model that may have longrope.
        is_partial: whether some of them may rotate.

    Raises:
        CheckpointError: a field is damaged, or the variant is not served.
    """
    name, rotary = _settings(config)
    kind = _read_kind(rotary, name, has_longrope=dim is not None)
    fixed = {} if is_partial else {_SHARE: 1.0}
    known = ("rope_type", "type", "rope_theta", _SHARE, *_FIELDS_OF_TYPE[kind])
    check_fields(rotary, name, known=known, fixed=fixed)
    positions = read_int(config, "max_position_embeddings")
    share = _read_share(config, rotary, name, dim) if is_partial and dim else 1.0
    scaling: Scaling
    if kind == "longrope":
        assert dim is not None
        positions, scaling = _read_longrope(config, rotary, name, positions, int(dim * share) // 2)
    else:
        scaling = _read_scaling(kind, rotary, name, positions)
    if isinstance(scaling, YarnScaling):
        # some checkpoints leave max_position_embeddings at the length before the extension
        extended = min(scaling.positions, 2 * _MOST_POSITIONS) * scaling.factor
        positions = max(positions, int(min(extended, 2 * _MOST_POSITIONS)))
    if positions > _MOST_POSITIONS:
        raise CheckpointError(
            f"{name} asks for more than {_MOST_POSITIONS} positions; allowed: at most as many, since their table is"
            " computed"
        )
    theta = _read_theta(config, rotary, name, default_theta)
    return RotaryConfig(theta, scaling, positions, share)


def _settings(config: Json) -> tuple[str, Json]:
    given = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    if not given:
        return "config.json", {}
    if len({show(settings) for settings in given.values()}) > 1:
        raise CheckpointError(
            "config.json has rope_scaling and rope_parameters, which disagree; allowed: one of them"
        )
    key, settings = given.popitem()
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json has {key} {show(settings)}; allowed: an object")
    return f"{key} of config.json", settings


def _read_kind(rotary: Json, name: str, *, has_longrope: bool) -> str:
    allowed = [kind for kind in _FIELDS_OF_TYPE if kind != "longrope" or has_longrope]
    given = [rotary[key] for key in ("rope_type", "type") if rotary.get(key) is not None]
    kind = given[0] if given else "default"
    if not isinstance(kind, str) or kind not in allowed:
        raise CheckpointError(f"{name} has the type {show(kind)}; allowed: {', '.join(allowed)}")
    if given[1:] not in ([], [kind]):
        raise CheckpointError(
            f"{name} has rope_type {show(kind)} and type {show(given[1])}; make them agree"
        )
    return kind


def _read_theta(config: Json, rotary: Json, name: str, default: float) -> float:
    inner, outer = rotary.get("rope_theta"), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(
            f"{name} has rope_theta {show(inner)} and config.json {show(outer)}; make them agree"
        )
    if inner is not None:
        return read_number(rotary, "rope_theta", name=name)
    return read_number(config, "rope_theta", default=default)


def _read_share(config: Json, rotary: Json, name: str, dim: int) -> float:
    holder, name = (config, "config.json") if rotary.get(_SHARE) is None else (rotary, name)
    share = read_number(holder, _SHARE, default=1.0, name=name)
    rotated = int(dim * share)
    if share > 1 or rotated % 2 or not rotated:
        raise CheckpointError(
            f"{name} has {_SHARE} {share:g}; allowed: numbers up to 1 that leave an even number of the {dim} features"
            " of a head"
        )
    return share


def _read_longrope(
    config: Json, rotary: Json, name: str, positions: int, frequencies: int
) -> tuple[int, LongRopeScaling]:
    """Return the longest sequence that is served, and the factors of sequences up to it."""
    # the field of the model comes first
    holder = config if _ORIGINAL in config else rotary
    original = read_int(
        holder, _ORIGINAL, default=positions, name=name if holder is rotary else "config.json"
    )
    factors = rotary.get("short_factor")
    if (
        not isinstance(factors, list)
        or len(factors) != frequencies
        or not all(type(each) in (int, float) and 0 < each < math.inf for each in factors)
    ):
        raise CheckpointError(
            f"{name} has short_factor {show(factors)}; allowed: a list of {frequencies} numbers above 0"
        )
    if rotary.get("attention_factor") is not None:
        attention = read_number(rotary, "attention_factor", name=name)
    else:
        factor = read_number(rotary, "factor", default=positions / original, name=name)
        has_more = factor > 1 and original > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if has_more else 1.0
    return min(positions, original), LongRopeScaling(tuple(map(float, factors)), attention)


def _read_scaling(kind: str, rotary: Json, name: str, positions: int) -> Scaling:
    # up to max_position_embeddings, dynamic scaling changes nothing, and longer sequences are refused
    if kind in ("default", "dynamic"):
        return LinearScaling()
    factor = read_number(rotary, "factor", name=name)
    if kind == "linear":
        return LinearScaling(factor)
    original = read_int(rotary, "original_max_position_embeddings", default=positions, name=name)
    if kind == "llama3":
        low = read_number(rotary, "low_freq_factor", name=name)
        high = read_number(rotary, "high_freq_factor", name=name)
        if low >= high:
            raise CheckpointError(
                f"{name} has low_freq_factor {low:g} and high_freq_factor {high:g}; allowed: low below high"
            )
        return Llama3Scaling(factor, low, high, original)

    def optional(key: str) -> float | None:
        return None if rotary.get(key) is None else read_number(rotary, key, name=name)

    return YarnScaling(
        factor=factor,
        beta_fast=read_number(rotary, "beta_fast", default=32.0, name=name),
        beta_slow=read_number(rotary, "beta_slow", default=1.0, name=name),
        positions=original,
        is_truncated=read_flag(rotary, "truncate", default=True, name=name),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


LayerKind: TypeAlias = Literal["full_attention", "sliding_attention"]

_KINDS: tuple[LayerKind, ...] = ("full_attention", "sliding_attention")


def read_kinds(
    config: Json, is_full: Callable[[int], bool], *, lowest: int = 1
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer.

    Args:
        is_full: whether a layer, by its number, reads all tokens where config.json has no `layer_types`.
        lowest: fewest layers.

    Raises:
        CheckpointError: `layer_types` has other names, or not one for each layer.
    """
    layers = read_layers(config, "num_hidden_layers", lowest=lowest)
    given = config.get("layer_types")
    if given is None:
        return tuple(
            "full_attention" if is_full(number) else "sliding_attention" for number in range(layers)
        )
    # a value of another type may have no hash
    is_known = isinstance(given, list) and all(each in _KINDS for each in given)
    if not is_known or len(given) != layers:
        raise CheckpointError(
            f"config.json has layer_types {show(given)}; allowed: {layers} names, each of {', '.join(_KINDS)}"
        )
    return tuple(given)


def read_windows(
    config: Json, kinds: Sequence[LayerKind], positions: int, *, has_both_sides: bool = False
) -> tuple[int, ...]:
    """Return the window of each layer; 0 where it holds every served sequence.

    Args:
        has_both_sides: whether the window of config.json has both sides.
    """
    if "sliding_attention" not in kinds:
        return (0,) * len(kinds)
    window = read_int(config, "sliding_window", default=4096)
    if has_both_sides:
        window = window // 2 + 1
    if not is_causal(config):
        # the masks of transformers then include the distance itself
        window += 1
    window = 0 if window >= positions else window
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_rotary_of_kinds(
    config: Json, thetas: Mapping[LayerKind, tuple[str, float]]
) -> dict[LayerKind, RotaryConfig]:
    """Return the rotary positions of each kind of layer.

    Args:
        thetas: the theta of each kind: its field in files of transformers 4, and its default. `rope_scaling` of such
            files is of layers that read all tokens.

    Raises:
        CheckpointError: a field is damaged, or asks for something that is not served.
    """
    given = config.get("rope_parameters") or {}
    if not isinstance(given, dict) or not set(given) <= set(thetas):
        raise CheckpointError(
            f"config.json has rope_parameters {show(given)}; allowed: an object with {', '.join(thetas)}"
        )
    found = {}
    for kind, (field, default) in thetas.items():
        fields = {
            "rope_parameters": given.get(kind),
            "max_position_embeddings": config.get("max_position_embeddings"),
        }
        # transformers 5 has both names for one object
        if kind == "full_attention" and config.get("rope_scaling") != given:
            fields["rope_scaling"] = config.get("rope_scaling")
        # null is not the default: releases of transformers differ in what it means
        theta = read_number(config, field, default=None if field in config else default)
        found[kind] = read_rotary(fields, default_theta=theta)
    return found
