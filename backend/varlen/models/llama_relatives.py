"""Relatives of Llama whose fields, layers or heads differ by more than `llama.OPTIONS` says.

Sources: Boizard et al. 2025, arXiv:2503.05500 (EuroBERT, an encoder). Granite Team 2024, Granite 3.0 Language Models,
github.com/ibm-granite/granite-3.0-language-models. Zheng et al. 2025, arXiv:2509.05209 (Hunyuan-MT). Abdin et al. 2024,
arXiv:2404.14219; Microsoft 2025, arXiv:2503.01743 (Phi-3 to Phi-4: joined matrices, partial rotary positions). Yang et
al. 2025, arXiv:2505.09388 (Qwen3 with experts). Bakouch et al. 2025, huggingface.co/blog/smollm3; Yang et al. 2025,
arXiv:2501.18795 (SmolLM3: some layers without positions). OLMo Team 2024, arXiv:2501.00656; 2025, arXiv:2512.13961:
OLMo 2 and 3 norm the results of layers, not their inputs, and queries and keys over all heads. OLMo 3 has windows in
three of four layers, and rotary positions of its own for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models import llama
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import RotaryPositions, half_order, read_rotary_tables
from varlen.models.blocks.heads import Heads, read_top, record_output
from varlen.models.blocks.layer_parts import Experts, FeedForward
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.family import Family, HeadConfig, decoder_classes
from varlen.models.checkpoint.files import (
    Json,
    read_choice,
    read_flag,
    read_int,
    read_layers,
    read_number,
    show,
)
from varlen.models.checkpoint.layers import LayerReader, Linear, TokenTable
from varlen.models.checkpoint.rotary_config import (
    LayerKind,
    LinearScaling,
    RotaryConfig,
    read_kinds,
    read_rotary,
    read_rotary_of_kinds,
    read_windows,
)
from varlen.program.rank import AttentionHeads

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

_Pooling: TypeAlias = Literal["cls", "mean", "late"]
_POOLINGS: Mapping[str, _Pooling] = {"bos": "cls", "mean": "mean", "late": "late"}


def _read_eurobert(config: Json) -> llama.LlamaConfig:
    _read_pooling(config)
    return llama.LlamaConfig.read(config)


def _read_pooling(config: Json) -> _Pooling:
    return read_choice(config, "classifier_pooling", _POOLINGS, default="late")


def _load_eurobert(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    model = llama.load(read, fields, replace(head, task="embed"))
    return replace(model, heads=_read_classifier(read.fp32, fields, head))


def _read_classifier(read: LayerReader, fields: Json, head: HeadConfig) -> Heads:
    hidden = llama.LlamaConfig.read(fields).hidden
    if head.task == "token_classify":
        return Heads(classifier=read.linear(["classifier"], hidden, [head.num_labels]))
    if head.task != "classify":
        return Heads()
    pooling = _read_pooling(fields)
    return Heads(
        pooling="mean" if pooling == "late" else pooling,
        dense=read.linear(["dense"], hidden, [hidden]),
        activation="gelu",
        pools_dense=pooling == "late",
        classifier=read.linear(["classifier"], hidden, [head.num_labels]),
    )


_EUROBERT = Family(
    architectures={
        **dict.fromkeys(("EuroBertModel", "EuroBertForMaskedLM"), "embed"),
        "EuroBertForSequenceClassification": "classify",
        "EuroBertForTokenClassification": "token_classify",
    },
    heads={
        "classify": "EuroBertForSequenceClassification",
        "rerank": "EuroBertForSequenceClassification",
        "token_classify": "EuroBertForTokenClassification",
    },
    fields=declare.DECODER.plus(
        llama.LlamaConfig.names() | llama.OPTIONS["eurobert"].fields,
        # another order of the same sums, and a token of training
        ("mask_token_id", "pretraining_tp"),
        {"hidden_act": "silu", "is_causal": False, "partial_rotary_factor": 1.0},
    ),
    read_sizes=_read_eurobert,
    load=_load_eurobert,
    is_unused=lambda name, _: name.startswith("lm_head."),
    tokenizer_class="PreTrainedTokenizerFast",
    kind="decoder",
    is_divisible=True,
    is_causal=lambda _: False,
)


_GRANITE_FIELDS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


def _read_factors(config: Json) -> tuple[float, ...]:
    """Return the factors of embeddings, scores and residual sums, and the divisor of logits."""
    return tuple(read_number(config, name, default=1.0) for name in _GRANITE_FIELDS)


def _read_granite(config: Json) -> llama.LlamaConfig:
    _read_factors(config)
    return llama.LlamaConfig.read(config)


def _load_granite(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    """Return the Granite of a checkpoint.

    Factors that follow a linear layer are in its weights, so no step has an op for them. Where the output layer is the
    table of embeddings, that has the divisor of logits, and the factor of embeddings takes it back.
    """
    config, model = llama.LlamaConfig.read(fields), llama.load(read, fields, head)
    of_embeddings, of_scores, of_sums, divisor = _read_factors(fields)

    def scaled_mlp(mlp: FeedForward | Experts) -> FeedForward:
        assert isinstance(mlp, FeedForward)
        return replace(mlp, down=mlp.down.scaled(of_sums))

    def with_factors() -> llama.Llama:
        layers = tuple(
            replace(
                layer,
                attention_output=layer.attention_output.scaled(of_sums),
                mlp=scaled_mlp(layer.mlp),
            )
            for layer in model.layers
        )
        heads, table, output, of_tokens = (
            model.heads,
            model.token_table,
            model.output,
            of_embeddings,
        )
        if head.logit_score is not None and heads.classifier is not None:
            heads = replace(heads, classifier=heads.classifier.scaled(1 / divisor))
        if output is not None and config.has_tied_output:
            table = replace(table, weight=table.weight / divisor)
            output, of_tokens = Linear(table.rows.t(), None), of_embeddings * divisor
        elif output is not None:
            output = output.scaled(1 / divisor)
        return replace(
            model,
            layers=layers,
            token_table=table,
            output=output,
            heads=heads,
            embedding_scale=of_tokens,
            score_scale=of_scores,
        )

    return read.computed(with_factors)


_GRANITE = llama.make_family(
    "Granite",
    "granite",
    "GPT2Tokenizer",
    read_sizes=_read_granite,
    load=_load_granite,
    fields=_GRANITE_FIELDS,
    classifiers=(),
)


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


_HUNYUAN = llama.make_family(
    "HunYuanDenseV1",
    "hunyuan_v1_dense",
    "PreTrainedTokenizerFast",
    read_sizes=lambda config: llama.LlamaConfig.read(_with_base(config)),
    load=lambda read, fields, head: llama.load(read, _with_base(fields), head),
    # a token of training
    fields=("eod_token_id",),
    classifiers=("classify", "rerank"),
)


# What transformers takes where config.json has none: this length is known also to rotary positions.
_PHI3_DEFAULTS = {"original_max_position_embeddings": 4096}


def _read_phi3(config: Json) -> llama.LlamaConfig:
    read = llama.LlamaConfig.read({**_PHI3_DEFAULTS, **config})
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    kind = settings and (settings.get("rope_type") or settings.get("type"))
    if kind not in (None, "default", "longrope") or (
        isinstance(read.rotary.scaling, LinearScaling) and read.rotary.scaling.factor != 1
    ):
        raise CheckpointError(
            f"the rotary positions of config.json have the type {show(kind)}; allowed: default, longrope"
        )
    return read


def _load_phi3(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    fields = {**_PHI3_DEFAULTS, **fields}
    config = llama.LlamaConfig.read(fields)
    heads, rotated = config.heads, config.rotary.rotated(config.heads.dim)
    if rotated == heads.dim:
        return llama.load(read, fields, head)
    model = llama.load(read.floats, fields, head)
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


_PHI3 = llama.make_family("Phi3", "phi3", "LlamaTokenizer", read_sizes=_read_phi3, load=_load_phi3)


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
    hidden: int = declare.size("hidden_size")
    positions: int = declare.size("max_position_embeddings")
    experts: int = declare.computed(_read_experts, *_NUM_EXPERTS)
    count: int = declare.computed(_read_count, "num_experts_per_tok")
    inner: int = declare.size("moe_intermediate_size", 768)
    normalizes: bool = declare.flag("norm_topk_prob")
    step: int = declare.size("decoder_sparse_step", 1)
    dense: frozenset[int] = declare.computed(_read_dense, "mlp_only_layers")

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense and (layer + 1) % self.step == 0


def _read_qwen3_moe(config: Json) -> llama.LlamaConfig:
    _ExpertsConfig.read(config)
    return llama.LlamaConfig.read(config)


def _load_qwen3_moe(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
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


_QWEN3_MOE = llama.make_family(
    "Qwen3Moe",
    "qwen3_moe",
    "Qwen2Tokenizer",
    load=_load_qwen3_moe,
    read_sizes=_read_qwen3_moe,
    # training, and the first layer with a window, which transformers 5 does not read
    fields=_ExpertsConfig.names()
    | {"max_window_layers", "output_router_logits", "router_aux_loss_coef"},
)


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


def _read_smollm3(config: Json) -> llama.LlamaConfig:
    _has_positions(config)
    return llama.LlamaConfig.read(_with_defaults(config))


def _load_smollm3(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    model = llama.load(read, _with_defaults(fields), head)
    tables = zip(model.cos_sin, _has_positions(fields), strict=True)
    return replace(model, cos_sin=tuple(table if has else None for table, has in tables))


_SMOLLM3 = llama.make_family(
    "SmolLM3",
    "smollm3",
    "PreTrainedTokenizerFast",
    read_sizes=_read_smollm3,
    load=_load_smollm3,
    fields=(_PLACES, _INTERVAL),
)

_WINDOW_FIELDS = frozenset({"layer_types", "sliding_window"})
# Layers of OLMo 3, by their number from 1, that read all tokens where config.json does not say it.
_EVERY = 4
_THETAS: Mapping[LayerKind, tuple[str, float]] = {
    "full_attention": ("rope_theta", 500_000.0),
    "sliding_attention": ("rope_theta", 500_000.0),
}


def _has_windows(config: Json) -> bool:
    return bool(config["model_type"] == "olmo3")


def _read_olmo_kinds(config: Json) -> tuple[LayerKind, ...]:
    if _has_windows(config):
        return read_kinds(config, lambda number: (number + 1) % _EVERY == 0)
    full: LayerKind = "full_attention"
    return (full,) * read_layers(config, "num_hidden_layers")


def _read_windows(config: Json) -> tuple[int, ...]:
    return read_windows(config, _read_olmo_kinds(config), _read_positions(config))


def _read_rotary(config: Json) -> tuple[RotaryConfig, ...]:
    kinds = _read_olmo_kinds(config)
    if not _has_windows(config):
        return (read_rotary(config),) * len(kinds)
    of_kinds = read_rotary_of_kinds(config, _THETAS)
    return tuple(of_kinds[kind] for kind in kinds)


def _read_positions(config: Json) -> int:
    return min(rotary.positions for rotary in _read_rotary(config))


@dataclass(frozen=True, slots=True)
class OlmoConfig(declare.ConfigFields):
    """What config.json says of a model."""

    heads: AttentionHeads = declare.computed(
        lambda config: llama.read_heads(config, None),
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    rotary: tuple[RotaryConfig, ...] = declare.computed(
        _read_rotary, "max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"
    )
    positions: int = declare.computed(_read_positions)
    vocab_size: int = declare.size("vocab_size")
    hidden: int = declare.size("hidden_size")
    inner: int = declare.size("intermediate_size")
    windows: tuple[int, ...] = declare.computed(_read_windows, "num_hidden_layers")
    norm_eps: float = declare.epsilon("rms_norm_eps", 1e-5)
    has_attention_bias: bool = declare.flag("attention_bias")
    has_tied_output: bool = declare.flag("tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class OlmoLayer:
    """One transformer layer.

    Attributes:
        query_norm, key_norm: weights of the norms of all queries and of all keys of a token.
        attention_norm, mlp_norm: `[hidden]`, weights of the norms of the results of both parts.
    """

    query: Linear
    key: Linear
    value: Linear
    query_norm: Tensor
    key_norm: Tensor
    attention_output: Linear
    attention_norm: Tensor
    mlp: FeedForward
    mlp_norm: Tensor
    window: int


@dataclass(frozen=True, slots=True)
class Olmo:
    """An OLMo 2 or OLMo 3 in one dtype.

    Attributes:
        cos_sin: `[positions, head_dim]` fp32 of each layer, see `varlen_kernels.reference.rotary`.
        output: `[hidden, vocabulary]`; None where the checkpoint has no output layer.
    """

    token_table: TokenTable
    cos_sin: tuple[Tensor, ...]
    layers: tuple[OlmoLayer, ...]
    final_norm: Tensor
    output: Linear | None
    attention_heads: AttentionHeads
    norm_eps: float
    heads: Heads

    def record(self, ops: Recorder, attention: Attention) -> Value:
        eps = self.norm_eps
        x = self.token_table.record(ops, inputs.token_ids(ops))
        for number, layer in enumerate(self.layers):
            attended = self._record_attention(ops, attention, number, x)
            x = ops.record("add", ops.rms_norm(attended, layer.attention_norm, eps=eps), x)
            y = ops.rms_norm(layer.mlp.record(ops, x, "silu"), layer.mlp_norm, eps=eps)
            x = ops.record("add", y, x)
        return ops.rms_norm(x, self.final_norm, eps=eps)

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        return record_output(ops, self.output, hidden, self.token_table.vocab_size)

    def _record_attention(
        self, ops: Recorder, attention: Attention, number: int, x: Value
    ) -> Value:
        layer, eps = self.layers[number], self.norm_eps
        queries = ops.rms_norm(layer.query.record(ops, x), layer.query_norm, eps=eps)
        keys = ops.rms_norm(layer.key.record(ops, x), layer.key_norm, eps=eps)
        qkv = ops.concat(ops.concat(queries, keys), layer.value.record(ops, x))
        context = attention.record(
            ops,
            number,
            qkv,
            self.attention_heads,
            positions=RotaryPositions(self.cos_sin[number], None, eps),
            window=layer.window,
        )
        return layer.attention_output.record(ops, context)


def _load_olmo(read: LayerReader, fields: Json, head: HeadConfig) -> Olmo:
    """Return the OLMo 2 or OLMo 3 of a checkpoint; see `Family`."""
    config = OlmoConfig.read(fields)
    prefix = "model." if "model.embed_tokens.weight" in read else ""
    table_name = f"{prefix}embed_tokens.weight"
    table = read.token_table(table_name, config.vocab_size, config.hidden)
    layers = read.layers(
        len(config.windows),
        lambda reader, index: _read_olmo_layer(
            reader, config, f"{prefix}layers.{index}", config.windows[index]
        ),
    )
    final_norm = read.last.tensor(f"{prefix}norm.weight", config.hidden)
    output, heads = read_top(
        read,
        head,
        table,
        config.hidden,
        is_tied=config.has_tied_output,
        table_name=table_name,
    )
    return Olmo(
        token_table=table,
        cos_sin=read_rotary_tables(read, config.rotary, config.heads.dim, table),
        layers=layers,
        final_norm=final_norm,
        output=output,
        attention_heads=config.heads,
        norm_eps=config.norm_eps,
        heads=heads,
    )


def _read_olmo_layer(read: LayerReader, config: OlmoConfig, name: str, window: int) -> OlmoLayer:
    hidden, heads, attention = config.hidden, config.heads, f"{name}.self_attn"
    key_width, has_bias = heads.keys * heads.dim, config.has_attention_bias

    def part(letter: str, width: int) -> Linear:
        return read.linear([f"{attention}.{letter}_proj"], hidden, [width], bias=has_bias)

    return OlmoLayer(
        query=part("q", heads.width),
        key=part("k", key_width),
        value=part("v", key_width),
        query_norm=read.tensor(f"{attention}.q_norm.weight", heads.width),
        key_norm=read.tensor(f"{attention}.k_norm.weight", key_width),
        attention_output=read.linear([f"{attention}.o_proj"], heads.width, [hidden], bias=has_bias),
        attention_norm=read.tensor(f"{name}.post_attention_layernorm.weight", hidden),
        mlp=llama.read_gated_mlp(read, f"{name}.mlp", (hidden, config.inner)),
        mlp_norm=read.tensor(f"{name}.post_feedforward_layernorm.weight", hidden),
        window=window,
    )


def _olmo_family(name: str) -> Family[Olmo]:
    architectures, heads = decoder_classes(name, ("classify", "rerank"))
    own = _WINDOW_FIELDS if name == "Olmo3" else frozenset[str]()
    return Family(
        architectures=architectures,
        heads=heads,
        fields=declare.DECODER.plus(
            OlmoConfig.names() | own,
            # another order of the same sums
            ("pretraining_tp",),
            {"hidden_act": "silu", "partial_rotary_factor": 1.0},
        ),
        read_sizes=OlmoConfig.read,
        load=_load_olmo,
        # frequencies, which old releases saved; a copy of the table where the output is tied to it
        is_unused=lambda name, _: name.endswith(".rotary_emb.inv_freq") or name == "lm_head.weight",
        tokenizer_class="GPT2Tokenizer",
        kind="decoder",
    )


FAMILIES: Mapping[str, Family[llama.Llama | Olmo]] = {
    "qwen3_moe": _QWEN3_MOE,
    "eurobert": _EUROBERT,
    "phi3": _PHI3,
    "granite": _GRANITE,
    "smollm3": _SMOLLM3,
    "hunyuan_v1_dense": _HUNYUAN,
    "olmo2": _olmo_family("Olmo2"),
    "olmo3": _olmo_family("Olmo3"),
}
