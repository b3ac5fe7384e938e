"""SmolLM3: the layers of Llama, some of them without positions.

Source: Bakouch et al. 2025, huggingface.co/blog/smollm3; Yang et al. 2025, arXiv:2501.18795 (layers without
positions); tensor names as Hugging Face transformers saves them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models import llama
from varlen.models.checkpoint.config_file import Json, read_flag, read_int, read_layers, show
from varlen.models.checkpoint.family import HeadConfig

if TYPE_CHECKING:
    from varlen.models.checkpoint.layers import LayerReader

_PLACES, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def _has_positions(config: Json) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions, 1 in a field with the reverse name."""
    layers = read_layers(config, "num_hidden_layers", lowest=0)
    given = config.get(_PLACES)
    if given is None:
        every = read_int(config, _INTERVAL, default=4)
        return tuple((number + 1) % every != 0 for number in range(layers))
    if (
        not isinstance(given, list)
        or len(given) < layers
        or any(each not in (0, 1) for each in given if isinstance(each, int))
        or not all(isinstance(each, int) for each in given)
    ):
        raise CheckpointError(
            f"config.json has {_PLACES} {show(given)}; allowed: a list of {layers} numbers, 1 for a layer with rotary"
            " positions and 0 for one without"
        )
    return tuple(bool(each) for each in given[:layers])


def _with_defaults(config: Json) -> Json:
    """Return config.json with what transformers takes for a tied output and kinds of layers."""
    config = {"tie_word_embeddings": True, **config}
    if config.get("layer_types") is not None:
        return config
    is_used = read_flag(config, "use_sliding_window", default=False)
    has_window = is_used and config.get("sliding_window") is not None
    kinds = [
        "full_attention" if has_positions or not has_window else "sliding_attention"
        for has_positions in _has_positions(config)
    ]
    return {**config, "layer_types": kinds}


def _read_sizes(config: Json) -> llama.LlamaConfig:
    _has_positions(config)
    return llama.LlamaConfig.read(_with_defaults(config))


def load(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    """Return the SmolLM3 of a checkpoint; see `Family`."""
    model = llama.load(read, _with_defaults(fields), head)
    tables = zip(model.cos_sin, _has_positions(fields), strict=True)
    return replace(model, cos_sin=tuple(table if has else None for table, has in tables))


FAMILY = llama.make_family(
    "SmolLM3",
    "smollm3",
    "PreTrainedTokenizerFast",
    read_sizes=_read_sizes,
    load=load,
    fields=(_PLACES, _INTERVAL),
)
