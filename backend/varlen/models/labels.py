"""The labels of a classifier, and the function that makes scores of its logits."""

from collections.abc import Mapping
from dataclasses import dataclass

from varlen.errors import CheckpointError
from varlen.models.config_file import Json, read_num_labels, show
from varlen.scores import ScoreFunction

# By `problem_type` of config.json.
_FUNCTION_OF_PROBLEM: Mapping[str, ScoreFunction] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# By the last part of a class name that sentence-transformers stores.
_FUNCTION_OF_CLASS: Mapping[str, ScoreFunction] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}


@dataclass(frozen=True, slots=True)
class Labels:
    """What the outputs of a classification head are.

    Attributes:
        names: in the order of the logits.
        function: makes scores of logits, unless a request names another.
    """

    names: tuple[str, ...]
    function: ScoreFunction


NO_LABELS = Labels((), "none")


def read_labels(config: Json) -> Labels:
    """Return the labels in config.json, with the scores that the original libraries give.

    The function is that of a CrossEncoder in sentence-transformers if the file has it, else that of the pipeline
    `text-classification` in transformers.

    Raises:
        CheckpointError: `id2label` does not number its labels from 0.
    """
    count = read_num_labels(config)
    return Labels(_names(config, count), _stored_function(config) or _function(config, count))


def _names(config: Json, count: int) -> tuple[str, ...]:
    names = config.get("id2label")
    if not isinstance(names, dict):
        return tuple(f"LABEL_{label}" for label in range(count))
    by_number = {str(number): str(name) for number, name in names.items()}
    if by_number.keys() != {str(label) for label in range(count)}:
        raise CheckpointError(
            f"config.json has id2label {show(names)}; allowed: labels numbered from 0 to {count - 1}"
        )
    return tuple(by_number[str(label)] for label in range(count))


def _stored_function(config: Json) -> ScoreFunction | None:
    """Return the function that sentence-transformers has stored, if it is one of ours."""
    stored = config.get("sentence_transformers")
    name = stored.get("activation_fn") if isinstance(stored, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    return _FUNCTION_OF_CLASS.get(str(name).rpartition(".")[-1])


def _function(config: Json, count: int) -> ScoreFunction:
    problem = config.get("problem_type")
    if count == 1 and problem != "regression":
        return "sigmoid"
    return _FUNCTION_OF_PROBLEM.get(str(problem), "softmax")
