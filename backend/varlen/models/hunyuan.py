"""Hunyuan and Hunyuan-MT: the layers of Llama, with norms behind rotary positions.

Source: Zheng et al. 2025, arXiv:2509.05209 (Hunyuan-MT); tensor and field names as Hugging Face transformers saves
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from varlen.models import llama
from varlen.models.checkpoint.config_file import Json, read_number
from varlen.models.checkpoint.family import HeadConfig

if TYPE_CHECKING:
    from varlen.models.checkpoint.layers import LayerReader

_ALPHA = "alpha"
# Of YaRN, beside a fixed base: transformers reads none of them.
_UNREAD = {"beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", _ALPHA}


def _with_base(config: Json) -> Json:
    """Return config.json with the larger base that `alpha` stands for."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(name)
    if not isinstance(scaling, dict) or not scaling.get(_ALPHA):
        return config
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "dynamic":
        # refused as an unknown field of the other types
        return config
    alpha = read_number(scaling, _ALPHA, name=f"{name} of config.json")
    dim = llama.read_heads(config, None).dim
    holder = scaling if scaling.get("rope_theta") is not None else config
    theta = read_number(holder, "rope_theta", default=10_000.0) * alpha ** (dim / max(dim - 2, 1))
    others = {key: value for key, value in scaling.items() if key not in _UNREAD}
    own = {**others, "rope_theta": theta}
    own |= {key: "default" for key in ("rope_type", "type") if key in scaling}
    return {**config, "rope_theta": None, name: own}


def _read_sizes(config: Json) -> llama.LlamaConfig:
    return llama.LlamaConfig.read(_with_base(config))


def load(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    """Return the Hunyuan of a checkpoint; see `Family`."""
    return llama.load(read, _with_base(fields), head)


FAMILY = llama.make_family(
    "HunYuanDenseV1",
    "hunyuan_v1_dense",
    "PreTrainedTokenizerFast",
    read_sizes=_read_sizes,
    load=load,
    # a token of training
    fields=("eod_token_id",),
    classifiers=("classify",),
)
