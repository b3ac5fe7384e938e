"""Serves a model, writes its varlen model beside it, and compares both."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from varlen.config import DType
from varlen.models.checkpoint.files import TOKENIZER, read_bytes
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array
from varlen.tasks import TASKS, Task
from varlen_tools.adopt import existing as existing_model
from varlen_tools.adopt.checkpoint import find_checkpoint, is_varlen
from varlen_tools.adopt.errors import AdoptError
from varlen_tools.adopt.existing import Existing, Request
from varlen_tools.adopt.load import Measured
from varlen_tools.adopt.session import open_session
from varlen_tools.adopt.view import write_view
from varlen_tools.doctor.comparison import Comparison, compare_values
from varlen_tools.fetch import FetchError, fetch, staging_parent
from varlen_tools.model_config import Inputs
from varlen_tools.model_source import find_source, read_model_config
from varlen_tools.scratch import scratch_folder
from varlen_tools.serve.server import ServerCommand

# Largest difference of a vector's length from 1, if lengths are 1 but for rounding in 16 bits.
_UNIT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is adopted, and how.

    Attributes:
        repository: the existing model repository.
        model: the model that clients ask; None if there is only one that can be meant.
        checkpoint: folder or hub name of the Hugging Face checkpoint; None looks for it in the repository.
        name: name of the new model; None appends `_varlen` to the name of the old one.
        output: output of the old model that is the answer; None chooses it.
        settings: engine parameters of the new model.
        texts: texts of the comparison and of the load.
        concurrency: requests in flight under load.
        seconds: time of the load on each model; 0 leaves it out.
        force: whether an earlier model of the new name is replaced.
    """

    repository: Path
    model: str | None
    checkpoint: str | None
    name: str | None
    output: str | None
    settings: Mapping[str, str]
    texts: Sequence[str]
    concurrency: int
    seconds: float
    force: bool


@dataclass(frozen=True, slots=True)
class Adoption:
    """What was written and found.

    Attributes:
        old: the old model, as it is asked.
        new: the new model, asked with the same texts or token ids.
        folder: folder of the new model.
        task: its task.
        comparison: the answers of both.
        loads: rates and latencies of the old and of the new one; empty without a load.
        replaced: ONNX models that Python's onnxruntime has run.
    """

    old: Existing
    new: Existing
    folder: Path
    task: Task
    comparison: Comparison
    loads: Sequence[Measured]
    replaced: Sequence[str]


def adopt_model(wish: Wish, command: ServerCommand, *, report: Callable[[str], object]) -> Adoption:
    """Write the varlen model of a model, and compare both.

    Args:
        wish: the model, and options.
        command: the server that runs both.
        report: function that shows a line of progress.

    Raises:
        AdoptError: the model is not of a kind that can be adopted, or refuses a request.
        CheckpointError: a config.pbtxt or the checkpoint cannot be read.
        ServerError: the server ends, or does not load a model.
    """
    with scratch_folder("varlen-adopt-") as folder:
        view = folder.path / "view"
        view.mkdir()
        replaced = write_view(wish.repository, view, command.backends)
        model = wish.model or _entry(view)
        name = wish.name or f"{model}_varlen"
        target = wish.repository / name
        _check_target(target, force=wish.force)
        source = wish.checkpoint or str(find_checkpoint(wish.repository, model))
        report(f"starting a server with {model}")
        with open_session(command, view, [model]) as session:
            old = session.read(model, wish.output)
            report(f"making {name} of {source}")
            # in the view until it is compared: a server may watch the repository
            (view / name).unlink(missing_ok=True)
            made = _fetch(view, source, name, wish.settings)
            checkpoint = find_source(made, {}).open_checkpoint()
            requests = _requests(old, wish.texts, checkpoint)
            theirs = session.ask(requests)
            task = _task(theirs[0], checkpoint, wish.settings)
            if task not in (checkpoint.task, wish.settings.get("task")):
                made = _fetch(view, str(made / "1"), name, {**wish.settings, "task": task})
        report(f"starting a server with {model} and {name}")
        # a server that loads a model while it runs loads one of any client, which is code
        with open_session(command, view, [model, name]) as session:
            new = _new(old, name, task, theirs)
            our_requests = _requests(new, wish.texts, checkpoint)
            comparison = _compare(wish, old, task, session.ask(our_requests), theirs)
            loads: Sequence[Measured] = ()
            if wish.seconds:
                report(f"sending both {wish.concurrency} texts at a time, {wish.seconds:g} s each")
                loads = session.measure([requests, our_requests], wish.concurrency, wish.seconds)
        _publish(made, target)
    return Adoption(old, new, target, task, comparison, loads, replaced)


def _check_target(target: Path, *, force: bool) -> None:
    """Raise AdoptError unless the new model may be there."""
    if not target.exists():
        return
    if not is_varlen(target):
        raise AdoptError(f"{target} is a model of another backend; choose another name: --name")
    if not force:
        raise AdoptError(f"{target} exists; --force replaces it")


def _publish(made: Path, target: Path) -> None:
    """Put a model in its place by a rename, instead of an earlier one."""
    repository = target.parent
    with scratch_folder(".adopt-", staging_parent(repository)) as scratch:
        # perhaps from another file system
        staged = Path(shutil.move(made, scratch.path))
        if target.exists():
            target.rename(scratch.path / "replaced")
        staged.rename(target)


def _requests(model: Existing, texts: Sequence[str], checkpoint: Checkpoint) -> list[Request]:
    """Return the request of each text to a model."""
    tokenizer = Tokenizer.from_buffer(read_bytes(checkpoint.folder, TOKENIZER))
    tokenizer.no_padding()
    return [model.request(text, tokenizer, checkpoint.max_sequence_tokens) for text in texts]


def _compare(
    wish: Wish,
    old: Existing,
    task: Task,
    ours: Sequence[Float32Array],
    theirs: Sequence[Float32Array],
) -> Comparison:
    dtype = cast(DType, wish.settings.get("dtype", "auto"))
    return compare_values(
        TASKS[task].answers,
        old.name,
        actual=ours,
        expected=theirs,
        # `auto` may be bf16, and the old model may have rounded too
        dtype="bf16" if dtype == "auto" else dtype,
    )


def _entry(view: Path) -> str:
    """Return the model that clients ask: the only ensemble, else the only model.

    Raises:
        AdoptError: there are several.
    """
    folders = [folder for folder in sorted(view.iterdir()) if (folder / "config.pbtxt").is_file()]
    configs = {folder.name: read_model_config(folder) for folder in folders}
    ensembles = [name for name, config in configs.items() if config.HasField("ensemble_scheduling")]
    found = ensembles or [name for name, config in configs.items() if config.backend != "varlen"]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise AdoptError(f"{len(found)} models may be meant ({names}); choose one: --model")
    return found[0]


def _fetch(repository: Path, source: str, name: str, settings: Mapping[str, str]) -> Path:
    try:
        return fetch(
            source,
            repository=repository,
            name=name,
            settings=settings,
            inputs=Inputs.all,
            force=True,
        )
    except FetchError as error:
        raise AdoptError(str(error)) from None


def _task(answer: Float32Array, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Task:
    """Return the task whose answers have the shape of the old model's.

    Raises:
        AdoptError: no task of the checkpoint has.
    """
    if named := settings.get("task"):
        # `fetch` has checked it
        return cast(Task, named)
    widths: dict[Task, int] = {
        "embed": checkpoint.embedding_size,
        "classify": checkpoint.num_labels,
        "hidden": checkpoint.hidden_size,
        "token_classify": checkpoint.num_labels,
    }
    has_tokens = answer.ndim > 1
    fitting = [
        task
        for task, width in widths.items()
        if width == answer.shape[-1]
        and TASKS[task].has_token_rows == has_tokens
        and task in {*checkpoint.tasks, "embed", "hidden"}
    ]
    # its own task first, if both have the same width
    fitting.sort(key=lambda task: task != checkpoint.task)
    if not fitting:
        raise AdoptError(
            f"the answers have the shape {answer.shape} for one text, which no task of the checkpoint has"
            f" ({checkpoint.architecture}: {', '.join(checkpoint.tasks)}); name the task: --task"
        )
    return fitting[0]


def _new(old: Existing, name: str, task: Task, theirs: Sequence[Float32Array]) -> Existing:
    """Return how the new model is asked for what the old one answers."""
    parameters: dict[str, Any] = {}
    if old.text is not None:
        parameters["truncate"] = True
    if task == "embed":
        lengths = np.linalg.norm(np.stack(theirs), axis=1)
        parameters["normalize"] = bool(np.abs(lengths - 1).max() < _UNIT)
    names = {"ids": "input_ids", "attention_mask": "attention_mask", "type_ids": "token_type_ids"}
    tokens = {role: existing_model.Tensor(names[role], "INT64", 2) for role in old.token_tensors}
    return replace(
        old,
        name=name,
        text=existing_model.Tensor("text", "BYTES", 2) if old.text is not None else None,
        token_tensors=tokens,
        output=TASKS[task].outputs[0].name,
        parameters=parameters,
    )
