"""Notes about checkpoints that load, but may not answer as expected."""

from collections.abc import Sequence
from pathlib import Path

from varlen.models.checkpoint.quantized_tensors import describe
from varlen.models.checkpoint.weights import adapter_names, read_headers
from varlen.models.checkpoint_folder import Checkpoint
from varlen.tasks import Task

# Endings of architectures whose models were trained to fill in words.
_WORD_HEADS = ("ForMaskedLM", "ForPreTraining")
# Tasks whose texts may be pairs.
_PAIR_TASKS: tuple[Task, ...] = ("classify", "rerank")
# Files of heads that are not read, which are pickles: of BGE-M3, for sparse vectors and for vectors of tokens, which
# `convert-pickle` converts, and the classifier of SetFit.
_BGE_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
_SETFIT_HEAD = "model_head.pkl"
UNSERVED_HEADS = (*_BGE_HEADS, _SETFIT_HEAD)
# Tokens after which `generate` of transformers ends an answer by default.
_DEFAULT_NEW_TOKENS = 20


def checkpoint_notes(
    checkpoint: Checkpoint, task: Task, max_sequence_tokens: int, *, keeps_codes: bool = False
) -> tuple[str, ...]:
    """Return sentences about a checkpoint that serves a task.

    Args:
        max_sequence_tokens: longest sequence of the served model.
    """
    ignored = checkpoint.ignored.note()
    notes = [ignored] if ignored else []
    if checkpoint.quantization is not None:
        headers = read_headers(checkpoint.weights_folder).values()
        notes.append(describe(headers, checkpoint.quantization, keeps_codes=keeps_codes))
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
    names = adapter_names(checkpoint.config)
    if names and checkpoint.adapter is None:
        notes.append(
            f"the checkpoint has adapters for tasks ({', '.join(names)}), and none is merged: its general model is"
            " served; the setting adapter names one"
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
    if (checkpoint.folder / "adapter_config.json").is_file():
        notes.append(
            "adapter_config.json is not read: the checkpoint's own weights are served, without an adapter. If the"
            " adapter is not merged into them, load both with peft, merge them with merge_and_unload, and save the"
            " result"
        )
    heads = unserved_heads(checkpoint.folder)
    if (checkpoint.folder / "config_setfit.json").is_file() and _SETFIT_HEAD not in heads:
        heads = (*heads, _SETFIT_HEAD)
    return (*notes, *unserved_head_notes(heads))


def unserved_heads(folder: Path, copy: Path | None = None) -> tuple[str, ...]:
    """Return the names of the files in a folder that hold unserved heads.

    Args:
        copy: a copy of the folder whose pickles may be converted; None is the folder itself.
    """
    return tuple(
        name
        for name in UNSERVED_HEADS
        if (folder / name).is_file() and not ((copy or folder) / Path(name).stem).is_dir()
    )


def unserved_head_notes(files: Sequence[str]) -> tuple[str, ...]:
    """Return sentences about files of unserved heads."""
    notes = []
    if heads := [name for name in files if name in _BGE_HEADS]:
        notes.append(
            f"{' and '.join(heads)} are not read: the heads of BGE-M3 for sparse vectors and for vectors of tokens are"
            " served from the folders that varlen convert-pickle writes of them"
        )
    if _SETFIT_HEAD in files:
        notes.append(
            f"{_SETFIT_HEAD} is not read: the classifier of SetFit is a pickle and is left out. Texts are embedded and"
            " not classified; apply the classifier to the vectors in the client"
        )
    return tuple(notes)
