"""Folders that look like a checkpoint and cannot be served, such as adapters of peft."""

from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import peek_json, show
from varlen.models.checkpoint.extraction import config_name
from varlen.models.checkpoint.files import has_file
from varlen.models.checkpoint.folder_forms import check_form, names_in
from varlen.models.checkpoint.incomplete_files import check_no_pointers
from varlen.models.checkpoint.router import has_router
from varlen.models.checkpoint.static_files import static_folder
from varlen.models.checkpoint.weights import INDEX, SINGLE


def check_is_transformer(folder: Path) -> None:
    """Raise CheckpointError with the remedy if a folder cannot be served.

    It may hold another kind of model, pointers instead of files, or a link out of it.
    """
    check_no_pointers(folder)
    check_form(folder, names_in(folder))
    adapter = peek_json(folder, "adapter_config.json")
    if isinstance(adapter, dict) and not _has_model(folder):
        base = show(adapter.get("base_model_name_or_path"))
        raise CheckpointError(
            f"{folder} holds an adapter of peft for the model {base}, not the model itself; load both with peft, merge"
            " them with merge_and_unload, and save the result and its tokenizer with save_pretrained"
        )


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder looks like a checkpoint.

    One of static embeddings or routes may have no config.json.
    """
    if has_file(folder, config_name(folder)):
        return True
    return static_folder(folder) is not None or has_router(folder)


def _has_model(folder: Path) -> bool:
    has_weights = has_file(folder, SINGLE) or has_file(folder, INDEX)
    return has_weights and has_file(folder, "config.json")
