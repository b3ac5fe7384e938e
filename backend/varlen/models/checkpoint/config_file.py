"""JSON files of a checkpoint folder, and the checks that all of them share."""

import json
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import has_file, locate, read_bytes
from varlen_kernels import Activation

Json: TypeAlias = dict[str, Any]
_Choice = TypeVar("_Choice")

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Fields of config.json that transformers reads, and that change no logit and no hidden state of any family.
HARMLESS_FIELDS = frozenset(
    # names and versions; code of pipelines, which never runs
    "_name_or_path base_model name_or_path _commit_hash custom_pipelines finetuning_task name task_specific_params"
    " tokenizer_class transformers_version"
    # labels and their scores, which `labels` reads
    " label2id sbert_ce_default_activation_function sentence_transformers"
    # training, whose dropout `config_fields.is_dropout` knows
    " gradient_checkpointing init_std initializer_factor initializer_range problem_type tie_encoder_decoder"
    # of EncoderDecoderModel, which is not served
    " cross_attention_hidden_size"
    # how transformers runs and what else it returns
    " _attn_implementation _attn_implementation_autoset attn_implementation chunk_size_feed_forward dtype"
    " output_attentions output_hidden_states return_dict torch_dtype torchscript use_bfloat16 use_cache"
    " use_flash_attention_2"
    # token ids, which a tokenizer adds or a decoder reads
    " bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id sep_token_id".split()
)

# Commas and brackets of a JSON file: the largest tokenizers that are known have 1.5 million.
_MOST_VALUES = 8_000_000
# A field's value is shown in a message up to this many characters.
_MAX_SHOWN = 80
# Far more than any model has.
_MOST_LAYERS = 10_000
_MOST_COMPUTED_POSITIONS = 1 << 20


def read_object(folder: Path, name: str) -> Json:
    """Return the object in a JSON file, or raise CheckpointError that names the file."""
    content = read_json(folder, name)
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} holds a {type(content).__name__}, not an object")
    return cast(Json, content)


def read_optional_object(folder: Path, name: str) -> Json:
    """Return the object in a JSON file, empty if there is no such file."""
    return read_object(folder, name) if has_file(folder, name) else {}


def read_json(folder: Path, name: str) -> Any:
    """Return the content of a JSON file, or raise CheckpointError that names the file."""
    content = read_bytes(folder, name)
    # at least one for each value, which takes more memory than its text
    if sum(content.count(each) for each in b",[{") > _MOST_VALUES:
        raise CheckpointError(f"{name} has too many values; allowed: at most {_MOST_VALUES}")
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from None


def peek_json(folder: Path, name: str) -> Any:
    """Return the content of a JSON file; None without one, or if it is damaged.

    Whoever needs it says what is wrong.

    Raises:
        CheckpointError: it is no file of the folder; see `locate`.
    """
    if not has_file(folder, name):
        return None
    locate(folder, name)
    try:
        return read_json(folder, name)
    except CheckpointError:
        return None


def read_int(
    config: Json,
    key: str,
    *,
    default: int | None = None,
    lowest: int = 1,
    name: str = "config.json",
) -> int:
    """Return an integer of a configuration file, or raise CheckpointError that names it.

    `default` stands for a field that is absent; null is refused.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise CheckpointError(f"{name} has {key} {value!r}; allowed: whole numbers from {lowest}")
    return value


def read_optional_int(config: Json, key: str, name: str) -> int | None:
    """Return an integer of a configuration file from 1; None where it is absent or null."""
    return None if config.get(key) is None else read_int(config, key, name=name)


def read_layers(config: Json, key: str, *, lowest: int = 1) -> int:
    """Return a number of layers in config.json, or raise CheckpointError that names it."""
    layers = read_int(config, key, lowest=lowest)
    # the layers are listed before their tensors are looked for
    if layers > _MOST_LAYERS:
        raise CheckpointError(
            f"config.json has {key} {layers}; allowed: whole numbers from {lowest} to {_MOST_LAYERS}"
        )
    return layers


def read_computed_positions(config: Json) -> int:
    """Return max_position_embeddings where loading computes their table, or raise CheckpointError."""
    positions = read_int(config, "max_position_embeddings")
    # no tensor of the checkpoint limits them
    if positions > _MOST_COMPUTED_POSITIONS:
        raise CheckpointError(
            f"config.json has max_position_embeddings {positions}; allowed: whole numbers up to"
            f" {_MOST_COMPUTED_POSITIONS}, since their table is computed"
        )
    return positions


def read_number(
    config: Json,
    key: str,
    *,
    default: float | None = None,
    above: float = 0.0,
    name: str = "config.json",
) -> float:
    """Return a finite number greater than `above`, or raise CheckpointError that names it."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < inf:
        raise CheckpointError(f"{name} has {key} {value!r}; allowed: numbers above {above:g}")
    return float(value)


def read_flag(config: Json, key: str, *, default: bool, name: str = "config.json") -> bool:
    """Return a boolean of a configuration file, or raise CheckpointError that names it."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} has {key} {value!r}; allowed: true, false")
    return value


def read_choice(
    config: Json,
    key: str,
    choices: Mapping[str, _Choice],
    *,
    default: str,
    name: str = "config.json",
) -> _Choice:
    """Return what a word in a configuration file stands for.

    Raises:
        CheckpointError: it is another word; the message has those allowed.
    """
    word = config.get(key, default)
    if not isinstance(word, str) or word not in choices:
        raise CheckpointError(f'{name} has {key} "{word}"; allowed: {", ".join(choices)}')
    return choices[word]


def check_multiple(config: Json, key: str, of: str) -> None:
    """Raise CheckpointError unless the size `key` is a multiple of the number `of`."""
    size, number = read_int(config, key), read_int(config, of)
    if size % number:
        raise CheckpointError(f"{key} {size} is not a multiple of {of} {number}")


def read_norm_eps(config: Json, key: str, *, default: float) -> float:
    """Return the epsilon of norms, which is added to a variance or a mean square."""
    eps = config.get(key, default)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < 1:
        raise CheckpointError(f"config.json has {key} {eps!r}; allowed: numbers from 0")
    return float(eps)


def read_num_labels(config: Json) -> int:
    """Return the number of outputs of a classification head."""
    labels = config.get("id2label")
    if isinstance(labels, dict):
        return len(labels)
    # transformers leaves id2label out when there are two labels, its default
    return read_int(config, "num_labels", default=2)


def is_causal(config: Json) -> bool:
    """Return whether the tokens of a decoder read only earlier ones.

    The masks of transformers 5 follow this field. Other forms of a config.json get it from `first_releases`.

    Raises:
        CheckpointError: it is neither true nor false.
    """
    given = config.get("is_causal", True)
    if not isinstance(given, bool):
        raise CheckpointError(f"config.json has is_causal {show(given)}; allowed: true, false")
    return given


def check_fields(
    config: Json,
    name: str,
    *,
    known: Collection[str],
    fixed: Mapping[str, object],
    remedy: str = "",
) -> None:
    """Raise CheckpointError for a field that would change results and is not served.

    Args:
        known: fields that are read elsewhere, or change no result.
        fixed: fields that are served with one value; null means that value too.
        remedy: end of the message.
    """
    for key, value in config.items():
        if key in fixed:
            if value is not None and value != fixed[key]:
                raise CheckpointError(
                    f"{name} has {key} {show(value)}; allowed: {show(fixed[key])}{remedy}"
                )
        elif key not in known and not is_off(value):
            raise CheckpointError(
                f'{name} has the field "{key}" ({show(value)}), which this version does not know{remedy}'
            )


def is_off(value: object) -> bool:
    """Return whether a field sets nothing: it is null, false, zero or empty."""
    return value is None or value in (0, "", [], {})


def show(value: object) -> str:
    """Return a value as JSON, shortened for a message."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
