"""Notes about checkpoints that load, but may not answer as expected."""

from collections.abc import Sequence
from pathlib import Path

from varlen.models.checkpoint_folder import Checkpoint
from varlen.tasks import Task

# Endings of architectures whose models were trained to fill in words.
_WORD_HEADS = ("ForMaskedLM", "ForPreTraining")
# Tasks whose texts may be pairs.
_PAIR_TASKS: tuple[Task, ...] = ("classify", "rerank")
# Files of heads that are not served: of BGE-M3, for sparse vectors and for vectors of tokens. They are pickles.
UNSERVED_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
# Tokens after which `generate` of transformers ends an answer by default.
_DEFAULT_NEW_TOKENS = 20


def checkpoint_notes(
    checkpoint: Checkpoint, task: Task, max_sequence_tokens: int
) -> tuple[str, ...]:
    """Return sentences about a checkpoint that serves a task.

    Args:
        checkpoint: the opened checkpoint.
        task: the task that it serves.
        max_sequence_tokens: longest sequence of the served model.
    """
    ignored = checkpoint.ignored.note()
    notes = [ignored] if ignored else []
    is_guess = not (checkpoint.folder / "modules.json").is_file()
    if task == "embed" and is_guess and checkpoint.architecture.endswith(_WORD_HEADS):
        notes.append(
            f"{checkpoint.architecture} is trained to fill in words, and the checkpoint has no modules.json of"
            f" sentence-transformers: its vectors are hidden states pooled by {', '.join(checkpoint.pooling)},"
            f" which it was not trained for; its tasks are {', '.join(checkpoint.tasks)}"
        )
    if task in _PAIR_TASKS and checkpoint.has_second_type and not checkpoint.has_token_types:
        notes.append(
            f"both texts of a pair have token type 0: {checkpoint.tokenizer_class}, the class of the tokenizer, gives"
            " no token types; if the model was trained with them, add token_type_ids to model_input_names in"
            " tokenizer_config.json"
        )
    settings = checkpoint.translate
    if task == "translate" and settings is not None and settings.defaults.max_new_tokens is None:
        # the start token is not part of an answer
        longest = max_sequence_tokens - 1
        notes.append(
            "the checkpoint has no max_length and no max_new_tokens: transformers ends an answer after"
            f" {_DEFAULT_NEW_TOKENS} tokens, this model after {longest}; send max_tokens in requests, or set"
            " max_new_tokens in generation_config.json"
        )
    return (*notes, *unserved_head_notes(unserved_heads(checkpoint.folder)))


def unserved_heads(folder: Path) -> tuple[str, ...]:
    """Return the names of the files in a folder that hold unserved heads."""
    return tuple(name for name in UNSERVED_HEADS if (folder / name).is_file())


def unserved_head_notes(files: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence about files of unserved heads, if there are any."""
    if not files:
        return ()
    return (
        f"{' and '.join(files)} are not read: the heads of BGE-M3 for sparse vectors and for vectors of tokens are"
        " not served, its dense vectors are",
    )
