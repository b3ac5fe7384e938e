"""The labels of a classifier, and the function that makes scores of its logits."""

from collections.abc import Mapping
from dataclasses import dataclass

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import Json, read_num_labels, show
from varlen.request.scores import ScoreFunction

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
        function: makes scores of logits, unless a request names another.
    """

    names: tuple[str, ...]
    function: ScoreFunction


NO_LABELS = Labels((), "none")


def read_labels(config: Json, activation_class: str | None) -> Labels:
    """Return the labels of a checkpoint, with the scores that the original libraries give.

    The function comes from CrossEncoder in sentence-transformers if a file has it, else from the pipeline
    `text-classification` in transformers.

    Args:
        activation_class: the class in config_sentence_transformers.json, which comes first, if the file has one.

    Raises:
        CheckpointError: `id2label` does not number its labels from 0, or the stored function is not one of ours.
    """
    count = read_num_labels(config)
    function = _stored_function(config, activation_class) or _function(config, count)
    return Labels(_names(config, count), function)


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


def _stored_function(config: Json, name: object) -> ScoreFunction | None:
    stored = config.get("sentence_transformers")
    name = name or (stored.get("activation_fn") if isinstance(stored, dict) else None)
    name = name or config.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    function = _FUNCTION_OF_CLASS.get(str(name).rpartition(".")[-1])
    if function is None:
        raise CheckpointError(
            f"the scores of this checkpoint are made by {show(name)}; allowed: {', '.join(_FUNCTION_OF_CLASS)}"
        )
    return function


def _function(config: Json, count: int) -> ScoreFunction:
    problem = config.get("problem_type")
    if count == 1 and problem != "regression":
        return "sigmoid"
    return _FUNCTION_OF_PROBLEM.get(str(problem), "softmax")
