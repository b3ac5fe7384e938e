"""Serves a model, writes its varlen model beside it, and compares both."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from google.protobuf import text_format
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from varlen.config import DType, EngineConfig
from varlen.execution.device import choose_device
from varlen.models.checkpoint.files import TOKENIZER, read_bytes
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array
from varlen.tasks import TASKS, Task
from varlen_tools.adopt.session import (
    Existing,
    Measured,
    ModelSide,
    Request,
    Session,
    Tensor,
    existing_side,
    open_session,
    our_dtype,
    our_side,
    with_parts,
    write_view,
)
from varlen_tools.adopt.wish import AdoptError, Wish
from varlen_tools.doctor.comparison import Comparison, compare_values
from varlen_tools.fetch import FetchError, check_arguments, fetch, staging_parent
from varlen_tools.model_config import Inputs
from varlen_tools.model_source import find_source, read_model_config
from varlen_tools.scratch import scratch_folder
from varlen_tools.serve.server import ServerCommand

# Largest difference of a vector's length from 1, if lengths are 1 but for rounding in 16 bits.
_UNIT = 0.02
# Folders between a model and its checkpoint. A limit, since links may lead in circles.
_DEPTH = 3
# Dtypes from the finest on.
_COARSE: tuple[DType, ...] = ("fp32", "fp16", "bf16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Candidate:
    """The new model in one dtype, compared with the old one."""

    side: ModelSide
    comparison: Comparison
    load: Measured | None


@dataclass(frozen=True, slots=True)
class Adoption:
    """What was written and found.

    Attributes:
        new: the new model, asked with the same texts or token ids.
        old_sides: the same of the old model, or of each step of an ensemble.
        candidates: the new model, in the dtype of the old one if its own is another, then in its own.
        replaced: ONNX models that Python's onnxruntime has run.
    """

    old: Existing
    new: Existing
    folder: Path
    task: Task
    old_sides: Sequence[ModelSide]
    old_dtype: DType
    is_assumed: bool
    old_load: Measured | None
    candidates: Sequence[Candidate]
    replaced: Sequence[str]

    @property
    def agrees(self) -> bool:
        return all(each.comparison.agrees for each in self.candidates)


def adopt_model(wish: Wish, command: ServerCommand, *, report: Callable[[str], object]) -> Adoption:
    """Write the varlen model of a model, and compare both.

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
        with _refusing():
            check_arguments(source, name, wish.parameters)
        report(f"starting a server with {model}")
        with open_session(command, view, [model]) as session:
            old = session.read(model, wish.output)
            report(f"making {name} of {source}")
            # in the view until it is compared: a server may watch the repository
            made = _make(wish, session, old, view / name, source)
        dtypes: list[DType | None] = [wish.dtype, *(side.dtype for side in made.old_sides)]
        dtype: DType | None = next(filter(None, dtypes), None)
        old_dtype: DType = dtype or "fp32"
        folders = [made.folder]
        if equal := _equal_dtype(old_dtype, find_source(made.folder, {}).config):
            folders.insert(0, _in_dtype(made.folder, equal))
        configs = {folder.name: find_source(folder, {}).config for folder in folders}
        report(f"starting a server with {', '.join([model, *configs])}")
        # a server that loads a model while it runs loads one of any client, which is code
        with open_session(command, view, [model, *configs]) as session:
            news = [_new(old, each, made.task, made.answers) for each in configs]
            sent = [_requests(new, wish.sent_texts, made.checkpoint) for new in news]
            old_load, *loads = _measure(session, wish, [made.requests, *sent], report)
            candidates = [
                _candidate(session, made, old_dtype, configs[ours[0].model], ours, load)
                for ours, load in zip(sent, loads, strict=True)
            ]
        _publish(made.folder, target)
    return Adoption(
        old,
        news[-1],
        target,
        made.task,
        made.old_sides,
        old_dtype,
        dtype is None,
        old_load,
        candidates,
        replaced,
    )


@dataclass(frozen=True, slots=True)
class _Made:
    folder: Path
    checkpoint: Checkpoint
    task: Task
    requests: Sequence[Request]
    answers: Sequence[Float32Array]
    old_sides: Sequence[ModelSide]


def _make(wish: Wish, session: Session, old: Existing, target: Path, source: str) -> _Made:
    view, name = target.parent, target.name
    target.unlink(missing_ok=True)
    folder = _fetch(view, source, name, wish.parameters)
    checkpoint = find_source(folder, {}).open_checkpoint()
    requests = _requests(old, wish.sent_texts, checkpoint)
    answers = session.ask(requests)
    old_sides = _old_sides(wish, session, with_parts(view, [old.name]), requests, checkpoint)
    task = _task(answers[0], checkpoint, wish.parameters)
    if task not in (checkpoint.task, wish.parameters.get("task")):
        folder = _fetch(view, str(folder / "1"), name, {**wish.parameters, "task": task})
    return _Made(folder, checkpoint, task, requests, answers, old_sides)


def _candidate(
    session: Session,
    made: _Made,
    old_dtype: DType,
    config: EngineConfig,
    requests: Sequence[Request],
    load: Measured | None,
) -> Candidate:
    counts = session.ask([replace(request, output="num_tokens") for request in requests])
    side = our_side(requests[0].model, config, [int(each[0]) for each in counts])
    comparison = compare_values(
        TASKS[made.task].answers,
        made.requests[0].model,
        actual=session.ask(requests),
        expected=made.answers,
        dtype=max(old_dtype, our_dtype(config), key=_COARSE.index),
    )
    return Candidate(side, comparison, load)


def _old_sides(
    wish: Wish,
    session: Session,
    names: Sequence[str],
    requests: Sequence[Request],
    checkpoint: Checkpoint,
) -> list[ModelSide]:
    tokenizer = session.find_tokenizer(names)
    lengths: dict[str, list[int]] = {}
    if tokenizer is not None:
        sent = _requests(tokenizer, wish.sent_texts, checkpoint)
        # a step may take what only its ensemble sends
        with suppress(InferenceServerException):
            lengths[tokenizer.name] = [answer.size for answer in session.ask(sent)]
    elif requests[0].inputs[0].datatype() != "BYTES":
        lengths[names[0]] = [int(each.inputs[0].shape()[-1]) for each in requests]
    sides = []
    for name in names:
        config, folder = session.config(name), wish.repository / name
        if "ensemble_scheduling" not in config:
            sides.append(existing_side(folder, config, lengths.get(name, ())))
    return sides


def _equal_dtype(old: DType, config: EngineConfig) -> DType | None:
    """Return the dtype setting that makes like of like.

    None if the new model has that dtype, or has it only to generate, as int4. A CPU computes models of fp16 in fp32. On
    a GPU only the weights of int8 are of 8 bits.
    """
    is_on_cpu = choose_device(config.device).type == "cpu"
    dtype: DType = "fp32" if old == "fp16" and is_on_cpu else old
    return None if dtype in ("int4", our_dtype(config)) else dtype


def _in_dtype(model: Path, dtype: DType) -> Path:
    made = model.with_name(f"{model.name}_{dtype}")
    while made.exists():
        # a model of the repository
        made = made.with_name(f"{made.name}_")
    config = read_model_config(model)
    config.name = made.name
    config.parameters["dtype"].string_value = dtype
    made.mkdir()
    (made / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")
    (made / "1").symlink_to(model / "1")
    return made


def _measure(
    session: Session,
    wish: Wish,
    models: Sequence[Sequence[Request]],
    report: Callable[[str], object],
) -> Sequence[Measured | None]:
    if not wish.seconds:
        return [None] * len(models)
    report(f"sending {wish.concurrency} texts at a time, {wish.seconds:g} s to each model")
    return session.measure(models, wish.concurrency, wish.seconds)


def _check_target(target: Path, *, force: bool) -> None:
    if not target.exists():
        return
    if not is_varlen(target):
        raise AdoptError(f"{target} is a model of another backend; choose another name: --name")
    if not force:
        raise AdoptError(f"{target} exists; --force replaces it")


def _publish(made: Path, target: Path) -> None:
    repository = target.parent
    with scratch_folder(".adopt-", staging_parent(repository)) as scratch:
        # perhaps from another file system
        staged = Path(shutil.move(made, scratch.path))
        if target.exists():
            target.rename(scratch.path / "replaced")
        staged.rename(target)


def _requests(model: Existing, texts: Sequence[str], checkpoint: Checkpoint) -> list[Request]:
    tokenizer = Tokenizer.from_buffer(read_bytes(checkpoint.folder, TOKENIZER))
    tokenizer.no_padding()
    return [model.request(text, tokenizer, checkpoint.max_sequence_tokens) for text in texts]


def _entry(view: Path) -> str:
    """Return the model that clients ask: the only ensemble, else the only model."""
    folders = [folder for folder in sorted(view.iterdir()) if (folder / "config.pbtxt").is_file()]
    configs = {folder.name: read_model_config(folder) for folder in folders}
    ensembles = [name for name, config in configs.items() if config.HasField("ensemble_scheduling")]
    found = ensembles or [name for name, config in configs.items() if config.backend != "varlen"]
    if not found:
        raise AdoptError("the repository has no config.pbtxt of a model of another backend")
    if len(found) > 1:
        names = ", ".join(found)
        raise AdoptError(f"{len(found)} models may be meant ({names}); choose one: --model")
    return found[0]


def _fetch(repository: Path, source: str, name: str, settings: Mapping[str, str]) -> Path:
    with _refusing():
        return fetch(
            source,
            repository=repository,
            name=name,
            settings=settings,
            inputs=Inputs.all,
            force=True,
        )


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except FetchError as error:
        raise AdoptError(str(error)) from None


def _task(answer: Float32Array, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Task:
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
    parameters: dict[str, Any] = {}
    if old.text is not None:
        parameters["truncate"] = True
    if task == "embed":
        lengths = np.linalg.norm(np.stack(theirs), axis=1)
        parameters["normalize"] = bool(np.abs(lengths - 1).max() < _UNIT)
    names = {"ids": "input_ids", "attention_mask": "attention_mask", "type_ids": "token_type_ids"}
    tokens = {role: Tensor(names[role], "INT64", 2) for role in old.token_tensors}
    return replace(
        old,
        name=name,
        text=Tensor("text", "BYTES", 2) if old.text is not None else None,
        token_tensors=tokens,
        output=TASKS[task].outputs[0].name,
        parameters=parameters,
    )


def find_checkpoint(repository: Path, model: str) -> Path:
    """Return the folder of a checkpoint, in the model's own folder or in another model's.

    Raises:
        AdoptError: there is none, or more than one.
    """
    others = [
        entry
        for entry in sorted(repository.iterdir())
        if entry.is_dir() and entry.name != model and not is_varlen(entry)
    ]
    for folders in ([repository / model], others):
        by_place: dict[Path, Path] = {}
        for path in (path for folder in folders for path in _checkpoints(folder, _DEPTH)):
            by_place.setdefault(path.resolve(), path)
        found = list(by_place.values())
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(str(each.relative_to(repository)) for each in found)
            raise AdoptError(f"{repository} has several checkpoints: {shown}; choose: --checkpoint")
    raise AdoptError(
        f"{repository} has no checkpoint with config.json and safetensors, which the weights come from; name the one"
        " that the model was made of, a folder or a hub name: --checkpoint"
    )


def is_varlen(model: Path) -> bool:
    """Return whether a model is of varlen, such as one of an earlier call."""
    has_config = (model / "config.pbtxt").is_file()
    return has_config and read_model_config(model).backend == "varlen"


def _checkpoints(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        yield folder
    elif depth and folder.is_dir():
        for entry in sorted(folder.iterdir()):
            yield from _checkpoints(entry, depth - 1)
