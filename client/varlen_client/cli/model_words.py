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
# The task of models whose config does not name it, by an output.
_TASK_OF_OUTPUT = {
    "sentence_embedding": "embed",
    "num_terms": "sparse_embed",
    "num_masks": "fill_mask",
    "token_embeddings": "token_embed",
    "last_hidden_state": "hidden",
    "text_output": "generate",
}


def task_of(info: ModelInfo) -> str | None:
    """Return the task of a model by its settings, else by its outputs."""
    if info.task is not None:
        return info.task
    found = [_TASK_OF_OUTPUT[name] for name in info.outputs if name in _TASK_OF_OUTPUT]
    if not found and "logits" in info.outputs:
        found = ["token_classify" if len(info.outputs["logits"]) > 1 else "classify"]
    return found[0] if found else None


def other_task(command: str, info: ModelInfo) -> str | None:
    """Return the error of a command on a model of another task, else None.

    Args:
        command: name of the function of the command.
        info: config of the model.
    """
    wanted = _TASK_OF_COMMAND.get(command, command)
    task = task_of(info)
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
