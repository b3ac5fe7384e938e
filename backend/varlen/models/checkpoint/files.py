"""Files of a checkpoint folder, which nothing else opens, and checks of JSON.

A folder may come from anyone. A file counts only if it is regular and in the folder, or in the hub's cache of the same
model; then it is read up to a limit. A pipe, a device or a link out of the folder is an error, not an absent file.
So are files that were not downloaded whole: pointers of Git LFS, and cut safetensors.
"""

import json
import os
import stat
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from varlen.errors import CheckpointError
from varlen_kernels import Activation

TOKENIZER = "tokenizer.json"

_MEBIBYTE = 1 << 20
# The largest tokenizers that are known have 35 MB, the largest index of weights 15 MB, and other files less than 5 MB.
_MOST_BYTES = {TOKENIZER: 128 * _MEBIBYTE, "model.safetensors.index.json": 64 * _MEBIBYTE}
_MOST_BYTES_OF_OTHERS = 16 * _MEBIBYTE
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def has_file(folder: Path, name: str) -> bool:
    """Return whether a folder has an entry of this name, of any kind."""
    return os.path.lexists(folder / name)


def read_bytes(folder: Path, name: str) -> bytes:
    """Return the content of a file.

    Raises:
        CheckpointError: it is absent, too large, or no file of the folder; see `locate`.
    """
    path, most = locate(folder, name), _most_bytes(name)
    try:
        # what was a file may have become a pipe
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _check_kind(name, os.fstat(descriptor))
            content = file.read(most + 1)
    except OSError as error:
        raise _unreadable(folder, name, error) from None
    if len(content) > most:
        raise _too_large(name)
    return content


def read_text(folder: Path, name: str) -> str:
    """Return the text in a file; raises as `read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(folder, name).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not text: {error}") from None


def check_readable(folder: Path, name: str) -> None:
    """Raise CheckpointError if `read_bytes` would not read a file, which a library reads itself."""
    if locate(folder, name).stat().st_size > _most_bytes(name):
        raise _too_large(name)


def locate(folder: Path, name: str) -> Path:
    """Return the real path of a file, for a library that opens it.

    Raises:
        CheckpointError: it is absent, no regular file, or a link that leads out of the folder.
    """
    try:
        path = (folder / name).resolve()
        if not any(path.is_relative_to(root) for root in _roots(folder.resolve())):
            raise CheckpointError(
                f"{name} is a link that leads out of the checkpoint's folder; copy the file there"
                if (folder / name).is_symlink()
                else f"{name} is outside the checkpoint folder"
            )
        _check_kind(name, path.stat())
    except (OSError, ValueError, RuntimeError) as error:
        # a name with a NUL, or a link to itself
        raise _unreadable(folder, name, error) from None
    return path


def _roots(folder: Path) -> list[Path]:
    """Return the folders that may hold the files of a checkpoint.

    In the hub's cache a snapshot, models--org--name/snapshots/hash, is links to models--org--name/blobs.
    """
    snapshots = [each for each in (folder, *folder.parents) if each.parent.name == "snapshots"]
    return [folder, *(each.parents[1] / "blobs" for each in snapshots[:1])]


def _most_bytes(name: str) -> int:
    return _MOST_BYTES.get(Path(name).name, _MOST_BYTES_OF_OTHERS)


def _too_large(name: str) -> CheckpointError:
    most = _most_bytes(name)
    return CheckpointError(f"{name} has more than {most} bytes; allowed: at most {most}")


def _check_kind(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise CheckpointError(f"{name} is {kind}; allowed: a regular file")


def _unreadable(folder: Path, name: str, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        is_link = (folder / name).is_symlink()
        return CheckpointError(
            f"{name} is a link to a file that is absent" if is_link else f"{folder} has no {name}"
        )
    reason = error.strerror if isinstance(error, OSError) else error
    return CheckpointError(f"{name} cannot be read: {reason}")


_POINTER = b"version https://git-lfs.github.com/spec/"
# A pointer has about 130.
_MOST_POINTER_BYTES = 1024
# The first bytes of a safetensors file are the size of its header.
_LENGTH_BYTES = 8
# Endings of files that serving reads, or that it can be made to read.
_READ = (".safetensors", ".json", ".txt", ".model", ".spm", ".bin", ".pt", ".jinja")


def check_no_pointers(folder: Path) -> None:
    """Raise CheckpointError if a file that serving needs is a pointer of Git LFS."""
    paths = [path for path in sorted(folder.glob("*")) if path.suffix in _READ]
    has_safetensors = any(path.suffix == ".safetensors" for path in paths)
    for path in paths:
        is_needed = path.suffix not in (".bin", ".pt") or not has_safetensors
        if is_needed and _is_pointer(path):
            raise CheckpointError(
                f"{path.name} is a pointer of Git LFS, not the file itself; get the files:"
                f" git -C {folder} lfs pull"
            )


def describe_damage(path: Path, error: Exception) -> str:
    """Return what is wrong with a safetensors file that cannot be opened, and the remedy."""
    expected, size = _expected_bytes(path), path.stat().st_size
    if expected is None or size >= expected:
        return f"{path.name} cannot be read: {error}"
    return f"{path.name} has {size} bytes and needs {expected}: it was not downloaded whole; download it again"


def _is_pointer(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_POINTER_BYTES:
            return False
        return read_bytes(path.parent, path.name).startswith(_POINTER)
    except (OSError, CheckpointError):
        # whoever needs it says so
        return False


def _expected_bytes(path: Path) -> int | None:
    """Return the size that a safetensors file needs; None if its header is damaged."""
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        begin = _LENGTH_BYTES + int.from_bytes(length, "little")
        if len(length) < _LENGTH_BYTES or path.stat().st_size < begin:
            return max(begin, _LENGTH_BYTES + 1)
        header = file.read(begin - _LENGTH_BYTES)
    try:
        ends = [
            tensor["data_offsets"][1]
            for name, tensor in json.loads(header).items()
            if name != "__metadata__"
        ]
        return begin + max(ends, default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None


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
    """Return an integer from 1; None where it is absent or null."""
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
