"""A Hugging Face checkpoint folder, read and checked without loading a weight.

Reads `config.json`, and where they exist sentence-transformers' `modules.json`,
`sentence_bert_config.json` and the configuration of its pooling. Nothing in the folder is executed
or unpickled.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from varlen.config import Task
from varlen.errors import CheckpointError
from varlen_kernels import Pooling

Json: TypeAlias = dict[str, Any]

_TASK_OF_ARCHITECTURE: dict[str, Task] = {
    "BertModel": "embed",
    "BertForMaskedLM": "embed",
    "BertForPreTraining": "embed",
    "BertForSequenceClassification": "classify",
    "BertForTokenClassification": "token_classify",
}
# Which head a task needs the checkpoint to have; the others run on the encoder alone.
_TASKS_WITH_HEAD: dict[Task, str] = {
    "classify": "BertForSequenceClassification",
    "rerank": "BertForSequenceClassification",
    "token_classify": "BertForTokenClassification",
}
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint folder says about itself.

    Attributes:
        folder: where its files are.
        config: `config.json`.
        task: what it was trained for: its architecture's head, else `embed`.
        pooling: how `embed` makes one vector of a sequence.
        normalize: whether `embed` divides that vector by its length unless a request says otherwise.
        hidden_size: features of a token.
        num_labels: outputs of the classification head, 0 when there is none.
        position_limit: longest sequence that has position embeddings, in tokens.
        max_sequence_tokens: longest sequence that it is meant for, in tokens; at most `position_limit`.
    """

    folder: Path
    config: Json
    task: Task
    pooling: Pooling
    normalize: bool
    hidden_size: int
    num_labels: int
    position_limit: int
    max_sequence_tokens: int

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Return what the checkpoint in `folder` says about itself.

        Raises:
            CheckpointError: a file is missing, is not JSON, or asks for something that varlen does not serve.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give a Hugging Face checkpoint folder"
            )
        config = _read_object(folder, "config.json")
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; save the checkpoint with its fast tokenizer"
            )
        architecture = _architecture(config)
        pooling, normalize = _sentence_modules(folder)
        position_limit = read_int(config, "max_position_embeddings")
        return cls(
            folder=folder,
            config=config,
            task=_TASK_OF_ARCHITECTURE[architecture],
            pooling=pooling,
            normalize=normalize,
            hidden_size=read_int(config, "hidden_size"),
            num_labels=_num_labels(config) if architecture in _TASKS_WITH_HEAD.values() else 0,
            position_limit=position_limit,
            max_sequence_tokens=min(position_limit, _trained_limit(folder) or position_limit),
        )

    def check_task(self, task: Task) -> None:
        """Raise CheckpointError unless this checkpoint has the head that `task` needs."""
        needed = _TASKS_WITH_HEAD.get(task)
        if needed is not None and needed != _architecture(self.config):
            raise CheckpointError(
                f'task "{task}" needs a {needed} checkpoint; this one is a {_architecture(self.config)}'
            )


def _architecture(config: Json) -> str:
    family = config.get("model_type")
    if family != "bert":
        raise CheckpointError(f'config.json has model_type "{family}"; this version serves: bert')
    architectures = config.get("architectures") or ["BertModel"]
    name = str(architectures[0])
    if name not in _TASK_OF_ARCHITECTURE:
        allowed = ", ".join(_TASK_OF_ARCHITECTURE)
        raise CheckpointError(f'config.json has the architecture "{name}"; allowed: {allowed}')
    return name


def _num_labels(config: Json) -> int:
    labels = config.get("id2label")
    # transformers leaves id2label out when there are two labels, its default
    return len(labels) if isinstance(labels, dict) else int(config.get("num_labels", 2))


def _sentence_modules(folder: Path) -> tuple[Pooling, bool]:
    """Return the pooling and whether vectors are normalised, from modules.json; mean and no when there is none."""
    if not (folder / "modules.json").is_file():
        return "mean", False
    pooling: Pooling = "mean"
    normalize = False
    modules = _read_json(folder, "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError("modules.json is not a list of objects")
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling(_read_object(folder, f"{module.get('path', '')}/config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f'modules.json has a module "{kind}"; allowed: Transformer, Pooling, Normalize'
            )
    return pooling, normalize


def _pooling(config: Json) -> Pooling:
    if "pooling_mode" in config:
        names = config["pooling_mode"]
        chosen = [names] if isinstance(names, str) else list(names)
        known = _POOLING_NAMES
    else:
        chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        known = _POOLING_FLAGS
    if len(chosen) != 1 or chosen[0] not in known:
        raise CheckpointError(f"the pooling is {chosen}; allowed: exactly one of {list(known)}")
    return known[chosen[0]]


def _trained_limit(folder: Path) -> int | None:
    """Return sentence-transformers' max_seq_length, at which it truncates, or None."""
    if not (folder / "sentence_bert_config.json").is_file():
        return None
    name = "sentence_bert_config.json"
    config = _read_object(folder, name)
    if config.get("max_seq_length") is None:
        return None
    return read_int(config, "max_seq_length", name=name)


def read_int(config: Json, key: str, *, lowest: int = 1, name: str = "config.json") -> int:
    """Return a whole number of a configuration file, or raise CheckpointError that names it."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise CheckpointError(f"{name} has {key} {value!r}; allowed: whole numbers from {lowest}")
    return value


def _read_object(folder: Path, name: str) -> Json:
    content = _read_json(folder, name)
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} holds a {type(content).__name__}, not an object")
    return cast(Json, content)


def _read_json(folder: Path, name: str) -> Any:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) and not (folder / name).is_symlink():
        raise CheckpointError(f"{name} leads out of the checkpoint folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {name}") from None
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from None
