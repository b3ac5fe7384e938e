"""Checks of a BERT checkpoint: fields of config.json, names and shapes of tensors.

Every field of config.json that can change a result is either read or refused; see
docs/decisions/0014-config-fields.md.
Source of the names: BERT as saved by Hugging Face transformers.
"""

from collections.abc import Mapping

from varlen.config import Task
from varlen.errors import CheckpointError
from varlen.models import config_file
from varlen.models.config_file import (
    ACTIVATIONS,
    Json,
    check_fields,
    check_multiple,
    check_unquantized,
    read_choice,
    read_int,
    read_norm_eps,
    read_num_labels,
)
from varlen.models.family import Family, ModelSizes
from varlen.models.weights import CheckpointWeights, TensorHeader, check_all_used, check_tensor
from varlen_kernels import Activation

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
HARMLESS_FIELDS = config_file.HARMLESS_FIELDS | frozenset(
    # training
    "attention_probs_dropout_prob hidden_dropout_prob tie_word_embeddings"
    # left over from Google's first checkpoints; no release of transformers reads them
    " directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head"
    " pooler_type".split()
)

# Tensors that an encoder does not use, by name; all pretraining heads are under `cls.`.
_HARMLESS_TENSORS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OTHER_HEADS = ("classifier.weight", "classifier.bias", "qa_outputs.weight", "qa_outputs.bias")


def read_sizes(config: Json) -> ModelSizes:
    """Return the sizes of an encoder; raise CheckpointError unless config.json describes one that is served."""
    check_unquantized(config)
    check_fields(config, "config.json", known=READ_FIELDS | HARMLESS_FIELDS, fixed=FIXED_FIELDS)
    activation_of(config)
    norm_eps_of(config)
    hidden = read_int(config, "hidden_size")
    read_int(config, "num_attention_heads")
    check_multiple(config, "hidden_size", "num_attention_heads")
    for key in ("intermediate_size", "type_vocab_size", "vocab_size"):
        read_int(config, key)
    read_int(config, "num_hidden_layers", lowest=0)
    return ModelSizes(hidden, read_int(config, "max_position_embeddings"))


def activation_of(config: Json) -> Activation:
    """Return the activation between the two linear layers of a feed-forward part."""
    return read_choice(config, "hidden_act", ACTIVATIONS, default="gelu")


def norm_eps_of(config: Json) -> float:
    """Return the epsilon of layer norms, which is added to the variance."""
    return read_norm_eps(config, "layer_norm_eps", default=1e-12)


def check_tensors(
    headers: Mapping[str, TensorHeader], config: Json, architecture: str, task: Task
) -> None:
    """Raise CheckpointError unless the tensors are those of the model in config.json, and no others.

    Args:
        headers: by name.
        config: of the checkpoint, checked.
        architecture: of the checkpoint.
        task: the task to serve.
    """
    prefix = prefix_of(headers)
    has_pooler = f"{prefix}pooler.dense.weight" in headers
    if task in ("classify", "rerank") and not has_pooler:
        raise CheckpointError(f'task "{task}" needs a pooler, which the checkpoint lacks')
    has_labels = FAMILY.architectures[architecture] in ("classify", "token_classify")
    num_labels = read_num_labels(config) if has_labels else 0
    expected = tensor_shapes(config, prefix, has_pooler=has_pooler, num_labels=num_labels)
    for name, shape in expected.items():
        check_tensor(headers, name, shape)
    harmless = {f"{prefix}{name}" for name in _HARMLESS_TENSORS} | set(_OTHER_HEADS)
    check_all_used(headers, expected, lambda name: name in harmless or name.startswith("cls."))


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


FAMILY = Family(
    architectures={
        "BertModel": "embed",
        "BertForMaskedLM": "embed",
        "BertForPreTraining": "embed",
        "BertForSequenceClassification": "classify",
        "BertForTokenClassification": "token_classify",
    },
    heads={
        "classify": "BertForSequenceClassification",
        "rerank": "BertForSequenceClassification",
        "token_classify": "BertForTokenClassification",
    },
    read_sizes=read_sizes,
    check_tensors=check_tensors,
    tokenizer_class="BertTokenizer",
)
