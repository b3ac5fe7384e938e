"""What models of each task do, in the words of a user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from varlen_client.wire import ModelInfo


@dataclass(frozen=True, slots=True)
class _Words:
    """Words about the models of a task.

    Attributes:
        does: verb and object of their work.
        makes: their answers.
        kind: a model that makes them.
    """

    does: str
    makes: str
    kind: str


_WORDS: Mapping[str, _Words] = {
    "embed": _Words("embeds texts", "vectors of texts", "an embedding model"),
    "sparse_embed": _Words("weighs terms of texts", "sparse vectors", "a SPLADE model"),
    "classify": _Words("labels texts", "labels of texts", "a classifier"),
    "rerank": _Words("ranks documents", "scores of documents", "a reranker"),
    "fill_mask": _Words("fills masks", "tokens for masks", "a masked language model"),
    "token_classify": _Words("labels tokens", "labels of tokens", "a token classifier"),
    "token_embed": _Words("embeds tokens", "vectors of tokens", "a ColBERT model"),
    "hidden": _Words("gives hidden states", "hidden states", "a model of the task hidden"),
    "generate": _Words("generates text", "generated text", "a model that generates"),
    "translate": _Words("translates texts", "translations", "a translation model"),
}
# The task of the models that a command asks, where it has another name.
_TASK_OF_COMMAND = {"similarity": "embed"}


def other_task(command: str, info: ModelInfo) -> str | None:
    """Return the error of a command on a model of another task, else None.

    Args:
        command: name of the function of the command.
        info: config of the model.
    """
    wanted = _TASK_OF_COMMAND.get(command, command)
    task = info.known_task
    if task is None or task not in _WORDS or wanted not in _WORDS:
        return None
    answered = {task}
    if task == "classify" and info.outputs.get("logits") == (1,):
        # of one label, its score
        answered.add("rerank")
    if info.task is None and task == "generate":
        answered.add("translate")
    if wanted in answered:
        return None
    own = f"varlen {task.replace('_', '-')}"
    return (
        f"{info.name} {_WORDS[task].does}; it has no {_WORDS[wanted].makes}: ask it with `{own}`,"
        f" or serve {_WORDS[wanted].kind} (--model names it)"
    )
