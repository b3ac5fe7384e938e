"""Qwen3 with experts as its feed-forward parts.

Source: Yang et al. 2025, arXiv:2505.09388; tensor names as Hugging Face transformers saves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models import llama
from varlen.models.blocks.feed_forward import Experts, FeedForward
from varlen.models.checkpoint import declared_fields as declare
from varlen.models.checkpoint.config_file import Json, read_flag, read_int, show
from varlen.models.checkpoint.family import HeadConfig

if TYPE_CHECKING:
    from varlen.models.checkpoint.layers import LayerReader

# The same number, under the name of older and of newer releases of transformers.
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_MOST_EXPERTS = 4096


def _read_experts(config: Json) -> int:
    given = {name: read_int(config, name, lowest=0) for name in _NUM_EXPERTS if name in config}
    experts = next(iter(given.values()), 128)
    if any(each != experts for each in given.values()):
        names = " and ".join(f"{name} {each}" for name, each in given.items())
        raise CheckpointError(f"config.json has {names}; make them agree")
    if experts > _MOST_EXPERTS:
        raise CheckpointError(f"a layer has {experts} experts; allowed: at most {_MOST_EXPERTS}")
    return experts


def _read_count(config: Json) -> int:
    count, experts = read_int(config, "num_experts_per_tok", default=8), _read_experts(config)
    if experts and count > experts:
        raise CheckpointError(
            f"config.json has num_experts_per_tok {count}; allowed: at most {experts}, the experts of a layer"
        )
    return count


def _read_dense(config: Json) -> frozenset[int]:
    """Return the numbers of more layers without experts than `decoder_sparse_step` leaves."""
    given = config.get("mlp_only_layers") or []
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise CheckpointError(
            f"config.json has mlp_only_layers {show(given)}; allowed: a list of numbers of layers"
        )
    return frozenset(given)


@dataclass(frozen=True, slots=True)
class _ExpertsConfig(declare.ConfigFields):
    """What config.json says of experts.

    Attributes:
        experts: experts of a layer; 0 for none.
        count: experts of a token.
        inner: features between the two linear layers of an expert.
        normalizes: whether the weights of a token's experts add up to 1.
        step: one layer of as many has experts, the last of them.
        dense: numbers of more layers without experts.
    """

    hidden: int = declare.size("hidden_size")
    positions: int = declare.size("max_position_embeddings")
    experts: int = declare.computed(_read_experts, *_NUM_EXPERTS)
    count: int = declare.computed(_read_count, "num_experts_per_tok")
    inner: int = declare.computed(
        lambda config: read_int(config, "moe_intermediate_size", default=768),
        "moe_intermediate_size",
    )
    normalizes: bool = declare.computed(
        lambda config: read_flag(config, "norm_topk_prob", default=False), "norm_topk_prob"
    )
    step: int = declare.computed(
        lambda config: read_int(config, "decoder_sparse_step", default=1), "decoder_sparse_step"
    )
    dense: frozenset[int] = declare.computed(_read_dense, "mlp_only_layers")

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense and (layer + 1) % self.step == 0


def _read_sizes(config: Json) -> llama.LlamaConfig:
    _ExpertsConfig.read(config)
    return llama.LlamaConfig.read(config)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    """Return the Qwen3 with experts of a checkpoint; see `Family`."""
    config, experts = llama.LlamaConfig.read(fields), _ExpertsConfig.read(fields)

    def read_mlp(reader: LayerReader, name: str, layer: int) -> FeedForward | Experts:
        if not experts.has_experts(layer):
            return llama.read_gated_mlp(reader, name, (config.width, config.inner))
        return _read_layer(reader, config.width, experts, name)

    return llama.load(read, fields, head, read_mlp)


def _read_layer(read: LayerReader, hidden: int, config: _ExpertsConfig, name: str) -> Experts:
    names = [f"{name}.experts.{number}" for number in range(config.experts)]
    return Experts(
        router=read.fp32.linear([f"{name}.gate"], hidden, [config.experts], bias=False),
        up=read.group_linear(
            [(f"{each}.gate_proj", f"{each}.up_proj") for each in names],
            hidden,
            config.inner,
            split="outputs",
        ),
        down=read.group_linear(
            [(f"{each}.down_proj",) for each in names], config.inner, hidden, split="inputs"
        ),
        count=config.count,
        normalizes=config.normalizes,
        is_gated=True,
    )


FAMILY = llama.make_family(
    "Qwen3Moe",
    "qwen3_moe",
    "Qwen2Tokenizer",
    load=load,
    read_sizes=_read_sizes,
    # training, and the first layer with a window, which transformers 5 does not read
    fields=_ExpertsConfig.names()
    | {"max_window_layers", "output_router_logits", "router_aux_loss_coef"},
)
