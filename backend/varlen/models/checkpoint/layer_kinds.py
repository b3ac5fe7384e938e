"""Kinds of attention layers in config.json, and the rotary positions of each kind.

Source: the names that transformers gives them since Gemma 2 and ModernBERT.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import Json, read_layers, read_number, show
from varlen.models.checkpoint.rotary_config import RotaryConfig, read_rotary

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
