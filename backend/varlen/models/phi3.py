"""Phi-3, Phi-3.5 and Phi-4: the layers of Llama, with joined matrices and partial rotary positions.

Source: Abdin et al. 2024, arXiv:2404.14219; Microsoft 2025, arXiv:2503.01743 (Phi-4-mini); tensor names as Hugging
Face transformers saves them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models import llama
from varlen.models.blocks.rotary import half_order
from varlen.models.checkpoint.config_file import Json, show
from varlen.models.checkpoint.family import HeadConfig
from varlen.models.checkpoint.layers import Linear
from varlen.models.checkpoint.rotary_config import LinearScaling

if TYPE_CHECKING:
    from varlen.models.checkpoint.layers import LayerReader

# What transformers takes where config.json has none: this length is known also to rotary positions.
_DEFAULTS = {"original_max_position_embeddings": 4096}


def _read_sizes(config: Json) -> llama.LlamaConfig:
    read = llama.LlamaConfig.read({**_DEFAULTS, **config})
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    kind = settings and (settings.get("rope_type") or settings.get("type"))
    if kind not in (None, "default", "longrope") or (
        isinstance(read.rotary.scaling, LinearScaling) and read.rotary.scaling.factor != 1
    ):
        raise CheckpointError(
            f"the rotary positions of config.json have the type {show(kind)}; allowed: default, longrope"
        )
    return read


def load(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    """Return the Phi-3 of a checkpoint; see `Family`."""
    fields = {**_DEFAULTS, **fields}
    config = llama.LlamaConfig.read(fields)
    model = llama.load(read, fields, head)
    heads, rotated = config.heads, config.rotary.rotated(config.heads.dim)
    if rotated == heads.dim:
        return model
    order = half_order(heads.dim, rotated)
    columns = [
        number * heads.dim + feature
        for number in range(heads.queries + heads.keys)
        for feature in order
    ]

    def ordered(layer: Linear) -> Linear:
        weight = layer.weight.clone()
        weight[:, : len(columns)] = layer.weight[:, columns]
        return replace(layer, weight=weight)

    return read.computed(
        lambda: replace(
            model,
            layers=tuple(replace(layer, qkv=ordered(layer.qkv)) for layer in model.layers),
        )
    )


FAMILY = llama.make_family("Phi3", "phi3", "LlamaTokenizer", read_sizes=_read_sizes, load=load)
