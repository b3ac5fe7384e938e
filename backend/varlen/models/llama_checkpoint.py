"""Checks of checkpoints of the Llama family: Llama, Mistral, Qwen2 and Qwen3.

They share one architecture and differ in their options: biases, norms of queries and keys, windows.
Source of the names: these models as saved by Hugging Face transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from varlen.errors import CheckpointError
from varlen.models.checkpoint import decoder_fields
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.config_file import (
    Json,
    check_multiple,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
    show,
)
from varlen.models.checkpoint.family import Family, ModelSizes
from varlen.models.checkpoint.rotary_config import RotaryConfig, read_rotary
from varlen.models.checkpoint.tensor_shapes import TensorShapes
from varlen.models.checkpoint.weights import CheckpointWeights, TensorHeader, check_shapes
from varlen.tasks import Task

# Fields that every model of the family reads.
READ_FIELDS = decoder_fields.READ_FIELDS | frozenset(
    "head_dim hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers"
    " num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta".split()
)
# Fields that are served with one value, which is what transformers assumes where they are absent.
FIXED_FIELDS: Mapping[str, object] = {
    **decoder_fields.FIXED_FIELDS,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}
# Fields that change no logit and no hidden state: training, and another order of the same sums.
HARMLESS_FIELDS = decoder_fields.HARMLESS_FIELDS | {"attention_dropout", "pretraining_tp"}

_WINDOW_FIELDS = frozenset(
    "layer_types max_window_layers sliding_window use_sliding_window".split()
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a model of the family adds to the common architecture.

    Attributes:
        fields: fields of config.json that it reads beside the common ones.
        has_qkv_bias: whether queries, keys and values always have a bias.
        has_head_norms: whether queries and keys are normed.
        head_dim: features of a head where config.json does not say them; None derives them.
        window: last tokens that a token reads where config.json does not say it; None is all.
    """

    fields: frozenset[str] = frozenset()
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    head_dim: int | None = None
    window: int | None = None


OPTIONS: Mapping[str, Options] = {
    "llama": Options(frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Options(frozenset({"sliding_window"}), window=4096),
    "qwen2": Options(_WINDOW_FIELDS, has_qkv_bias=True, window=4096),
    "qwen3": Options(
        _WINDOW_FIELDS | {"attention_bias"}, has_head_norms=True, head_dim=128, window=4096
    ),
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields of config.json that shape the model.

    Attributes:
        num_heads: query heads of a layer.
        num_kv_heads: key heads of a layer, and value heads.
        head_dim: features of a head.
        windows: for each layer, the number of last tokens that a token reads; 0 is all.
        has_qkv_bias, has_output_bias: whether linear layers before and after the attention have a bias.
        has_mlp_bias: whether those of the feed-forward part have one.
        has_head_norms: whether queries and keys are normed.
        has_tied_output: whether the output layer is the embedding table.
    """

    vocab_size: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    windows: tuple[int, ...]
    norm_eps: float
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    has_tied_output: bool

    @classmethod
    def read(cls, config: Json) -> "LlamaConfig":
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        options = OPTIONS[config["model_type"]]

        def flag(name: str) -> bool:
            return name in options.fields and read_flag(config, name, default=False)

        num_heads, num_kv_heads, head_dim = _read_heads(config, options)
        rotary = read_rotary(config)
        return cls(
            vocab_size=read_int(config, "vocab_size"),
            hidden=read_int(config, "hidden_size"),
            inner=read_int(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary=rotary,
            windows=_read_windows(config, options, rotary.positions),
            norm_eps=read_norm_eps(config, "rms_norm_eps", default=1e-6),
            has_qkv_bias=options.has_qkv_bias or flag("attention_bias"),
            has_output_bias=flag("attention_bias"),
            has_mlp_bias=flag("mlp_bias"),
            has_head_norms=options.has_head_norms,
            has_tied_output=read_flag(config, "tie_word_embeddings", default=False),
        )

    @property
    def query_width(self) -> int:
        """Features of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Features of the keys of one token, and of its values."""
        return self.num_kv_heads * self.head_dim


def prefix_of(tensors: Mapping[str, TensorHeader] | CheckpointWeights) -> str:
    """Return the prefix of the decoder's tensor names; models with a head have one."""
    return "model." if "model.embed_tokens.weight" in tensors else ""


def tensor_shapes(
    config: LlamaConfig, prefix: str, *, has_output: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that loading reads, by name.

    Args:
        config: of the checkpoint.
        prefix: of the tensor names.
        has_output: whether the output layer has a matrix of its own.
    """
    hidden, inner = config.hidden, config.inner
    shapes = TensorShapes()

    shapes[f"{prefix}embed_tokens.weight"] = (config.vocab_size, hidden)
    for index in range(len(config.windows)):
        layer = f"{prefix}layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        shapes.add_norm(f"{layer}.input_layernorm", hidden, bias=False)
        shapes.add_linear(
            f"{attention}.q_proj", hidden, config.query_width, bias=config.has_qkv_bias
        )
        shapes.add_linear(f"{attention}.k_proj", hidden, config.key_width, bias=config.has_qkv_bias)
        shapes.add_linear(f"{attention}.v_proj", hidden, config.key_width, bias=config.has_qkv_bias)
        if config.has_head_norms:
            shapes[f"{attention}.q_norm.weight"] = shapes[f"{attention}.k_norm.weight"] = (
                config.head_dim,
            )
        shapes.add_linear(
            f"{attention}.o_proj", config.query_width, hidden, bias=config.has_output_bias
        )
        shapes.add_norm(f"{layer}.post_attention_layernorm", hidden, bias=False)
        shapes.add_linear(f"{mlp}.gate_proj", hidden, inner, bias=config.has_mlp_bias)
        shapes.add_linear(f"{mlp}.up_proj", hidden, inner, bias=config.has_mlp_bias)
        shapes.add_linear(f"{mlp}.down_proj", inner, hidden, bias=config.has_mlp_bias)
    shapes.add_norm(f"{prefix}norm", hidden, bias=False)
    if has_output:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _read_heads(config: Json, options: Options) -> tuple[int, int, int]:
    """Return the numbers of query and key heads, and the features of one."""
    queries = read_int(config, "num_attention_heads")
    # absent in the first Llama models, which have as many key heads as query heads
    has_keys = config.get("num_key_value_heads") is not None
    keys = read_int(config, "num_key_value_heads") if has_keys else queries
    if queries % keys:
        raise CheckpointError(
            f"num_attention_heads {queries} is not a multiple of num_key_value_heads {keys}"
        )
    if config.get("head_dim") is not None:
        dim = read_int(config, "head_dim")
    elif options.head_dim is not None:
        dim = options.head_dim
    else:
        check_multiple(config, "hidden_size", "num_attention_heads")
        dim = config["hidden_size"] // queries
    if dim % 2:
        raise CheckpointError(
            f"heads have {dim} features; allowed: even numbers, for rotary positions"
        )
    return queries, keys, dim


def _read_windows(config: Json, options: Options, positions: int) -> tuple[int, ...]:
    """Return the window of each layer; 0 where it holds every sequence that is served."""
    layers = read_layers(config, "num_hidden_layers", lowest=0)
    window = _read_window(config, options)
    size = 0 if window is None or window >= positions else window
    if "layer_types" not in options.fields:
        return (size,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = read_int(config, "max_window_layers", default=28, lowest=0)
        return tuple(size if index >= first else 0 for index in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(f"config.json has layer_types {show(kinds)}; allowed: {layers} names")
    sizes = {"full_attention": 0} | ({} if window is None else {"sliding_attention": size})
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in sizes]
    if unknown:
        raise CheckpointError(
            f"config.json has {show(unknown[0])} in layer_types; allowed: {', '.join(sizes)}"
            f"{'' if window else ' (without a sliding_window that is used)'}"
        )
    return tuple(sizes[kind] for kind in kinds)


def _read_window(config: Json, options: Options) -> int | None:
    """Return the last tokens that layers with a window read; None without a window."""
    if "sliding_window" not in options.fields:
        return None
    is_switch_known = "use_sliding_window" in options.fields
    if is_switch_known and not read_flag(config, "use_sliding_window", default=False):
        return None
    window = config.get("sliding_window", options.window)
    return None if window is None else read_int({"sliding_window": window}, "sliding_window")


def _read_sizes(config: Json) -> ModelSizes:
    sizes = LlamaConfig.read(config)
    return ModelSizes(sizes.hidden, sizes.rotary.positions)


def _check_tensors(
    headers: Mapping[str, TensorHeader],
    config: Json,
    architecture: str,
    task: Task,  # noqa: ARG001  # what is read belongs to the architecture
) -> None:
    sizes = LlamaConfig.read(config)
    prefix = prefix_of(headers)
    has_output = architecture.endswith("ForCausalLM") and not sizes.has_tied_output
    own_task = FAMILIES[config["model_type"]].architectures[architecture]
    expected = tensor_shapes(sizes, prefix, has_output=has_output)
    expected |= decoder_fields.score_shapes(config, own_task, sizes.hidden)
    check_shapes(headers, expected, _is_harmless)


def _is_harmless(name: str) -> bool:
    # frequencies, which old releases saved; a copy of the table where the output is tied to it
    return name.endswith(".rotary_emb.inv_freq") or name == "lm_head.weight"


def _family(name: str, tokenizer_class: str) -> Family:
    options = OPTIONS[name.lower()]
    return Family(
        architectures={
            f"{name}ForCausalLM": "generate",
            f"{name}Model": "embed",
            f"{name}ForSequenceClassification": "classify",
            f"{name}ForTokenClassification": "token_classify",
        },
        heads={
            "generate": f"{name}ForCausalLM",
            "classify": f"{name}ForSequenceClassification",
            "rerank": f"{name}ForSequenceClassification",
            "token_classify": f"{name}ForTokenClassification",
        },
        fields=FieldRules(READ_FIELDS | options.fields, HARMLESS_FIELDS, FIXED_FIELDS),
        read_sizes=_read_sizes,
        check_tensors=_check_tensors,
        tokenizer_class=tokenizer_class,
        kind="decoder",
    )


FAMILIES: Mapping[str, Family] = {
    "llama": _family("Llama", "LlamaTokenizer"),
    "mistral": _family("Mistral", "LlamaTokenizer"),
    "qwen2": _family("Qwen2", "Qwen2Tokenizer"),
    "qwen3": _family("Qwen3", "Qwen2Tokenizer"),
}
