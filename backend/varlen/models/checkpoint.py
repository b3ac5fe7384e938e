"""A Hugging Face checkpoint folder, read and checked without loading a weight.

Nothing in the folder is executed or unpickled. `fetch` and every load use the same checks, so
`fetch` accepts what the server loads.
"""

from dataclasses import dataclass
from pathlib import Path

from varlen.config import Task
from varlen.errors import CheckpointError
from varlen.models.bert_checkpoint import check_config, check_tensors, num_labels_of
from varlen.models.config_file import Json, read_int, read_object
from varlen.models.sentence_transformers import read_sentence_settings
from varlen.models.tokenizer_files import read_tokenizer_limit
from varlen.models.weights import read_headers
from varlen_kernels import Pooling

_TASK_OF_ARCHITECTURE: dict[str, Task] = {
    "BertModel": "embed",
    "BertForMaskedLM": "embed",
    "BertForPreTraining": "embed",
    "BertForSequenceClassification": "classify",
    "BertForTokenClassification": "token_classify",
}
# Architecture with the head of a task; the other tasks need no head.
_TASKS_WITH_HEAD: dict[Task, str] = {
    "classify": "BertForSequenceClassification",
    "rerank": "BertForSequenceClassification",
    "token_classify": "BertForTokenClassification",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Architecture and settings of a checkpoint.

    Attributes:
        folder: where its files are.
        config: `config.json`.
        task: the task of its architecture's head, else `embed`.
        pooling: how `embed` makes one vector of a sequence.
        normalize: whether `embed` divides that vector by its length, by default.
        default_prompt: text that `embed` puts before every text.
        hidden_size: features of a token.
        num_labels: outputs of the classification head, 0 when there is none.
        position_limit: longest sequence that has position embeddings, in tokens.
        max_sequence_tokens: longest sequence by default, in tokens; at most `position_limit`.
    """

    folder: Path
    config: Json
    task: Task
    pooling: Pooling
    normalize: bool
    default_prompt: str
    hidden_size: int
    num_labels: int
    position_limit: int
    max_sequence_tokens: int

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Return the checkpoint in a folder, once its files are checked.

        Raises:
            CheckpointError: a file is missing, is not JSON, or asks for something that varlen does not serve.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give a Hugging Face checkpoint folder"
            )
        config = read_object(folder, "config.json")
        architecture = _architecture(config)
        check_config(config)
        sentence = read_sentence_settings(folder)
        tokenizer_limit = read_tokenizer_limit(folder, lowercase=sentence.lowercase)
        position_limit = read_int(config, "max_position_embeddings")
        trained_limit = sentence.max_seq_length or tokenizer_limit or position_limit
        return cls(
            folder=folder,
            config=config,
            task=_TASK_OF_ARCHITECTURE[architecture],
            pooling=sentence.pooling,
            normalize=sentence.normalize,
            default_prompt=sentence.default_prompt,
            hidden_size=read_int(config, "hidden_size"),
            num_labels=num_labels_of(config) if architecture in _TASKS_WITH_HEAD.values() else 0,
            position_limit=position_limit,
            max_sequence_tokens=min(position_limit, trained_limit),
        )

    def check_task(self, task: Task) -> None:
        """Raise CheckpointError unless this checkpoint has the head and the tensors that `task` needs.

        Reads the headers of the weights, not the weights.
        """
        needed = _TASKS_WITH_HEAD.get(task)
        if needed is not None and needed != _architecture(self.config):
            raise CheckpointError(
                f'task "{task}" needs a {needed} checkpoint; this one is a {_architecture(self.config)}'
            )
        headers = read_headers(self.folder)
        check_tensors(headers, self.config, num_labels=self.num_labels, task=task)


def _architecture(config: Json) -> str:
    family = config.get("model_type")
    if family != "bert":
        raise CheckpointError(f'config.json has model_type "{family}"; this version serves: bert')
    names = config.get("architectures") or ["BertModel"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in _TASK_OF_ARCHITECTURE:
        allowed = ", ".join(_TASK_OF_ARCHITECTURE)
        raise CheckpointError(f'config.json has the architecture "{name}"; allowed: {allowed}')
    return name
