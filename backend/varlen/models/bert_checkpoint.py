"""Checks of a BERT checkpoint: fields of config.json, names and shapes of tensors.

Every field of config.json that can change a result is either read or refused; see
docs/decisions/0014-config-fields.md.
Source of the names: BERT as saved by Hugging Face transformers.
"""

from collections.abc import Mapping

from varlen.config import Task
from varlen.errors import CheckpointError
from varlen.models.config_file import Json, check_fields, read_int
from varlen.models.weights import CheckpointWeights, TensorHeader, check_tensor
from varlen_kernels import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Fields that this version reads.
READ_FIELDS = frozenset(
    "architectures hidden_act hidden_size id2label intermediate_size layer_norm_eps max_position_embeddings"
    " model_type num_attention_heads num_hidden_layers num_labels type_vocab_size vocab_size".split()
)
# Fields that are served with one value, which is what transformers assumes where they are absent.
FIXED_FIELDS: dict[str, object] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
    "pruned_heads": {},
}
# Fields that change no logit and no hidden state.
HARMLESS_FIELDS = frozenset(
    # names, versions, labels
    "_name_or_path name_or_path _commit_hash transformers_version label2id finetuning_task language name"
    " sentence_transformers task_specific_params tokenizer_class"
    # training
    " attention_probs_dropout_prob classifier_dropout gradient_checkpointing hidden_dropout_prob"
    " initializer_range problem_type tie_encoder_decoder tie_word_embeddings"
    # how transformers runs and what else it returns
    " _attn_implementation attn_implementation chunk_size_feed_forward dtype output_attentions"
    " output_hidden_states output_past return_dict torch_dtype torchscript use_bfloat16 use_cache"
    # token ids, which a tokenizer adds or a decoder reads
    " bos_token_id cls_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id"
    # left over from Google's first checkpoints; no release of transformers reads them
    " directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head"
    " pooler_type".split()
)

# Tensors that an encoder does not use, by name; all pretraining heads are under `cls.`.
_HARMLESS_TENSORS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OTHER_HEADS = ("classifier.weight", "classifier.bias", "qa_outputs.weight", "qa_outputs.bias")


def check_config(config: Json) -> None:
    """Raise CheckpointError unless config.json describes an encoder that is served."""
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            "config.json has quantization_config; quantized weights are not served"
        )
    check_fields(config, "config.json", known=READ_FIELDS | HARMLESS_FIELDS, fixed=FIXED_FIELDS)
    activation_of(config)
    norm_eps_of(config)
    heads, hidden = read_int(config, "num_attention_heads"), read_int(config, "hidden_size")
    if hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    for key in ("intermediate_size", "max_position_embeddings", "type_vocab_size", "vocab_size"):
        read_int(config, key)
    read_int(config, "num_hidden_layers", lowest=0)


def activation_of(config: Json) -> Activation:
    """Return the activation between the two linear layers of a feed-forward part."""
    name = config.get("hidden_act", "gelu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(
            f'config.json has hidden_act "{name}"; allowed: {", ".join(ACTIVATIONS)}'
        )
    return ACTIVATIONS[name]


def norm_eps_of(config: Json) -> float:
    """Return the epsilon of layer norms, which is added to the variance."""
    eps = config.get("layer_norm_eps", 1e-12)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < 1:
        raise CheckpointError(f"config.json has layer_norm_eps {eps!r}; allowed: numbers from 0")
    return float(eps)


def num_labels_of(config: Json) -> int:
    """Return the number of outputs of a classification head."""
    labels = config.get("id2label")
    if isinstance(labels, dict):
        return len(labels)
    # transformers leaves id2label out when there are two labels, its default
    return read_int({"num_labels": 2, **config}, "num_labels")


def check_tensors(
    headers: Mapping[str, TensorHeader], config: Json, *, num_labels: int, task: Task
) -> None:
    """Raise CheckpointError unless the tensors are those of the model in config.json, and no others.

    Args:
        headers: by name.
        config: of the checkpoint, checked.
        num_labels: outputs of its classification head, 0 without one.
        task: the task to serve.
    """
    prefix = prefix_of(headers)
    has_pooler = f"{prefix}pooler.dense.weight" in headers
    if task in ("classify", "rerank") and not has_pooler:
        raise CheckpointError(f'task "{task}" needs a pooler, which the checkpoint lacks')
    expected = tensor_shapes(config, prefix, has_pooler=has_pooler, num_labels=num_labels)
    for name, shape in expected.items():
        check_tensor(headers, name, shape)
    harmless = {f"{prefix}{name}" for name in _HARMLESS_TENSORS} | set(_OTHER_HEADS)
    unused = [
        name
        for name in headers
        if name not in expected and name not in harmless and not name.startswith("cls.")
    ]
    if unused:
        raise CheckpointError(
            f'the checkpoint has the tensor "{min(unused)}", which the model in config.json does not use'
            f" ({len(unused)} such tensors); scales of quantized weights, adapters and added layers are not served"
        )


def prefix_of(tensors: Mapping[str, TensorHeader] | CheckpointWeights) -> str:
    """Return the prefix of the encoder's tensor names; models with a head have one."""
    return "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""


def tensor_shapes(
    config: Json, prefix: str, *, has_pooler: bool, num_labels: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that loading reads, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {}

    def add_linear(name: str, fan_in: int, fan_out: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (fan_out, fan_in), (fan_out,)

    def add_norm(name: str) -> None:
        shapes[f"{name}.LayerNorm.weight"] = shapes[f"{name}.LayerNorm.bias"] = (hidden,)

    for table, size in (
        ("word", "vocab_size"),
        ("position", "max_position_embeddings"),
        ("token_type", "type_vocab_size"),
    ):
        shapes[f"{prefix}embeddings.{table}_embeddings.weight"] = (config[size], hidden)
    add_norm(f"{prefix}embeddings")
    for index in range(config["num_hidden_layers"]):
        layer = f"{prefix}encoder.layer.{index}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            add_linear(f"{layer}.attention.{part}", hidden, hidden)
        add_norm(f"{layer}.attention.output")
        add_linear(f"{layer}.intermediate.dense", hidden, inner)
        add_linear(f"{layer}.output.dense", inner, hidden)
        add_norm(f"{layer}.output")
    if has_pooler:
        add_linear(f"{prefix}pooler.dense", hidden, hidden)
    if num_labels:
        add_linear("classifier", hidden, num_labels)
    return shapes
