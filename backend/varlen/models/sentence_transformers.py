"""Settings of sentence-transformers in a checkpoint: pooling, normalization, prompt, limit.

The files are modules.json, the configurations of its modules, sentence_bert_config.json and
config_sentence_transformers.json. A field that would change vectors and is not served is refused
by name; see docs/decisions/0014-config-fields.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varlen.errors import CheckpointError
from varlen.models.config_file import (
    Json,
    check_fields,
    read_int,
    read_json,
    read_object,
    read_optional_object,
    show,
)
from varlen_kernels import Pooling

_BERT_CONFIG = "sentence_bert_config.json"
_MODEL_CONFIG = "config_sentence_transformers.json"

_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
}
# By task, the output of transformers that the module returns, and the name that it gets.
_OUTPUTS_OF_TASK = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
_KNOWN_MODEL_FIELDS = frozenset(
    # similarity_fn_name is for `similarity`, activation_fn for the scores of a cross-encoder
    "__version__ requirements prompts default_prompt_name model_type activation_fn similarity_fn_name".split()
)


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """Settings of the steps around a transformer.

    Attributes:
        pooling: how one vector is made of a sequence.
        normalize: whether the vector is divided by its length.
        default_prompt: text that it puts before every text.
        max_seq_length: length at which it truncates, in tokens; None if no file has it.
        lowercase: whether texts are lowercased even if the tokenizer does not.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    default_prompt: str = ""
    max_seq_length: int | None = None
    lowercase: bool = False


def read_sentence_settings(folder: Path, *, pooling: Pooling = "mean") -> SentenceSettings:
    """Return the settings in a checkpoint folder; defaults where files are absent.

    Args:
        folder: of the checkpoint.
        pooling: where no file names one.

    Raises:
        CheckpointError: a file is damaged, or asks for something that is not served.
    """
    paths = _module_paths(folder)
    transformer = _transformer_config(folder)
    includes_prompt = True
    if "Pooling" in paths:
        name = f"{paths['Pooling']}/config.json"
        config = read_object(folder, name)
        pooling = _pooling(config, name)
        includes_prompt = config.get("include_prompt") is not False
    if "Normalize" in paths:
        _check_normalize(folder, paths["Normalize"])
    prompt = _default_prompt(folder)
    if prompt and not includes_prompt:
        raise CheckpointError(
            f"the pooling has include_prompt false and {_MODEL_CONFIG} a default prompt {show(prompt)};"
            " a prompt that pooling leaves out is not served"
        )
    limit = transformer.get("max_seq_length")
    return SentenceSettings(
        pooling=pooling,
        normalize="Normalize" in paths,
        default_prompt=prompt,
        max_seq_length=(
            None if limit is None else read_int(transformer, "max_seq_length", name=_BERT_CONFIG)
        ),
        lowercase=bool(transformer.get("do_lower_case")),
    )


def _module_paths(folder: Path) -> dict[str, str]:
    """Return the module folders in modules.json, by kind; empty without the file."""
    if not (folder / "modules.json").is_file():
        return {}
    modules = read_json(folder, "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError("modules.json is not a list of objects")
    kinds = [_module_kind(module) for module in modules]
    if tuple(kinds) != _MODULES[: len(kinds)]:
        raise CheckpointError(
            f"modules.json has the modules {', '.join(kinds)}; allowed: {', '.join(_MODULES)}, in this order"
        )
    paths = {
        kind: str(module.get("path") or "") for kind, module in zip(kinds, modules, strict=True)
    }
    if paths.get("Transformer"):
        raise CheckpointError(
            f'modules.json has the transformer in the folder "{paths["Transformer"]}";'
            " allowed: the checkpoint folder itself"
        )
    return paths


def _module_kind(module: Json) -> str:
    name = str(module.get("type", ""))
    kind = name.rpartition(".")[-1]
    if kind not in _MODULES:
        raise CheckpointError(f'modules.json has a module "{kind}"; allowed: {", ".join(_MODULES)}')
    if not name.startswith("sentence_transformers."):
        raise CheckpointError(
            f'modules.json has a module "{name}"; allowed: modules of sentence_transformers'
        )
    return kind


def _pooling(config: Json, name: str) -> Pooling:
    flags = {key for key in config if key.startswith("pooling_mode_")}
    known = {"pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension"}
    check_fields(config, name, known=known | flags, fixed={})
    names: dict[str, Pooling]
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        chosen = modes if isinstance(modes, list) else [modes]
        names = _POOLING_NAMES
    else:
        chosen = [key for key in config if key in flags and config[key]]
        names = _POOLING_FLAGS
    if len(chosen) != 1 or not isinstance(chosen[0], str) or chosen[0] not in names:
        raise CheckpointError(f"the pooling is {chosen}; allowed: exactly one of {list(names)}")
    return names[chosen[0]]


def _check_normalize(folder: Path, path: str) -> None:
    name = f"{path}/config.json"
    fixed = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
    check_fields(read_optional_object(folder, name), name, known=(), fixed=fixed)


def _transformer_config(folder: Path) -> Json:
    config = read_optional_object(folder, _BERT_CONFIG)
    task = config.get("transformer_task") or "feature-extraction"
    if task not in _OUTPUTS_OF_TASK:
        raise CheckpointError(
            f"{_BERT_CONFIG} has transformer_task {show(task)}; allowed: {', '.join(_OUTPUTS_OF_TASK)}"
        )
    output, name = _OUTPUTS_OF_TASK[task]
    fixed: dict[str, Any] = {
        "modality_config": {"text": {"method": "forward", "method_output_name": output}},
        "module_output_name": name,
    }
    # unpad_inputs chooses between two ways to the same vectors
    known = ("transformer_task", "max_seq_length", "do_lower_case", "unpad_inputs")
    check_fields(config, _BERT_CONFIG, known=known, fixed=fixed)
    return config


def _default_prompt(folder: Path) -> str:
    config = read_optional_object(folder, _MODEL_CONFIG)
    kind = config.get("model_type") or "SentenceTransformer"
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        raise CheckpointError(
            f"{_MODEL_CONFIG} has model_type {show(kind)}; allowed: SentenceTransformer, CrossEncoder"
        )
    check_fields(config, _MODEL_CONFIG, known=_KNOWN_MODEL_FIELDS, fixed={"truncate_dim": None})
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompts = config.get("prompts") or {}
    if not isinstance(name, str) or not isinstance(prompts, dict) or name not in prompts:
        raise CheckpointError(
            f"{_MODEL_CONFIG} has default_prompt_name {show(name)}; allowed: null, or one of its prompts:"
            f" {', '.join(prompts) or 'it has none'}"
        )
    prompt = prompts[name] or ""
    if not isinstance(prompt, str):
        raise CheckpointError(f"{_MODEL_CONFIG} has the prompt {show(prompt)}; allowed: strings")
    if prompt and kind == "CrossEncoder":
        raise CheckpointError(
            f"{_MODEL_CONFIG} has a default prompt {show(prompt)}; prompts of a CrossEncoder are not served"
        )
    return prompt
