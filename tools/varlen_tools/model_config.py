"""config.pbtxt of a checkpoint: complete, with every setting below its description."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum

from varlen.config import SETTINGS, EngineConfig
from varlen.errors import ConfigError
from varlen.models.checkpoint_folder import Checkpoint
from varlen.server.config import entry_text, tensors_of
from varlen.server.kinds import kind_of
from varlen.tasks import Task, TensorSpec
from varlen.wire.rows import DEFAULT_MAX_ROWS


class Inputs(str, Enum):
    """Kinds of inputs that config.pbtxt names.

    Without a file of input data, perf_analyzer sends random data as every input, also as an optional one, and refuses
    an input of variable length.
    """

    all = "all"
    text = "text"
    ids = "ids"


# Tasks that take no single texts.
_PAIR_TASKS: tuple[Task, ...] = ("rerank", "question_answer")
# Lines of config.pbtxt above the inputs.
_NOTES: Mapping[Inputs, str] = {
    Inputs.all: "# Texts or token ids: a request has one of them. perf_analyzer needs --input-data.",
    Inputs.text: "# Texts. `fetch --inputs all` writes the other inputs too; perf_analyzer then needs --input-data.",
    Inputs.ids: "# Token ids; clients of ONNX models send the others too. perf_analyzer needs --input-data.",
}


def render_config(
    name: str,
    checkpoint: Checkpoint,
    config: EngineConfig,
    max_batch_size: int | None = None,
    inputs: Inputs | None = None,
) -> str:
    """Return a complete config.pbtxt, which loads without auto-completion too.

    Args:
        inputs: kind of inputs; by default the texts, and all for a task that generates, whose options are inputs.

    Raises:
        CheckpointError: the server would refuse the checkpoint for this task.
        ConfigError: a setting does not fit the checkpoint.
    """
    from varlen.execution import (
        device,  # import torch
        model_info,  # import torch
    )

    task: Task = config.task or checkpoint.task
    checkpoint.check_outputs(task, config.further_tasks)
    device.check_dtype(config.dtype, config.device)
    device.check_task_dtype(config.dtype, task)
    limit = model_info.longest_sequence(task, checkpoint, config)
    values = _settings_of(task, config) | {
        "task": task,
        "max_sequence_tokens": limit,
        "max_queued_tokens": model_info.queue_limit(config, limit),
        "max_text_bytes": model_info.text_limit(config, limit),
    }
    streams = kind_of(task).streams
    inputs = inputs or (Inputs.all if streams else Inputs.text)
    all_inputs, outputs = tensors_of(task, checkpoint, config.further_tasks)
    return "\n".join(
        [
            "# Written by `varlen fetch`; edit it as you like.",
            f'name: "{name}"',
            'backend: "varlen"',
            *(_once_per_request(task, max_batch_size) if streams else _rows(max_batch_size)),
            "",
            _NOTES[inputs],
            *_tensors("input", _input_specs(task, all_inputs, inputs)),
            "",
            *_tensors("output", outputs),
            "",
            "# One engine; `device` below chooses its device. KIND_GPU with gpus: [ 1 ] gives it the second GPU.",
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            *(line for key, value in values.items() for line in _parameter(key, value)),
            "",
        ]
    )


def _settings_of(task: Task, config: EngineConfig) -> dict[str, object]:
    """Return the settings that the task reads, by name; refuse others that have been set."""
    values: dict[str, object] = asdict(config)
    ignored = [name for name, setting in SETTINGS.items() if task not in setting.tasks]
    for name in ignored:
        if values.pop(name) != SETTINGS[name].default:
            raise ConfigError(f"{name} is set; the task {task} ignores it: leave it out")
    return values


def _rows(max_batch_size: int | None) -> list[str]:
    rows = max_batch_size or DEFAULT_MAX_ROWS
    return ["# Largest number of rows in one request.", f"max_batch_size: {rows}"]


def _once_per_request(task: Task, max_batch_size: int | None) -> list[str]:
    if max_batch_size is not None:
        raise ConfigError(
            f"max_batch_size is {max_batch_size}; a request of the task {task} holds one prompt:"
            " leave it out"
        )
    return [
        "# A request holds one prompt. `true` streams answers; with `false`, plain requests get one response each.",
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
    ]


def _input_specs(task: Task, specs: Sequence[TensorSpec], inputs: Inputs) -> Sequence[TensorSpec]:
    """Return the inputs of config.pbtxt.

    The first input of one kind is required, and so is the second text of a pair where the task takes no single texts.
    """
    if inputs == Inputs.all:
        return specs
    if kind_of(task).streams:
        name = "text_input" if inputs == Inputs.text else "input_ids"
        return [replace(spec, optional=False) for spec in specs if spec.name == name]
    needed = {"text", "input_ids", *(["text_pair"] if task in _PAIR_TASKS else [])}
    return [
        replace(spec, optional=spec.name not in needed)
        for spec in specs
        if (spec.name in ("text", "text_pair")) == (inputs == Inputs.text)
    ]


def read_max_batch_size(text: str | None) -> int | None:
    """Return the number in `--set max_batch_size=`, or raise ConfigError."""
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f'max_batch_size is "{text}"; allowed: whole numbers from 1')
    return int(text)


def _tensors(kind: str, specs: Sequence[TensorSpec]) -> list[str]:
    return [f"{kind} [", ",\n".join(f"  {entry_text(spec)}" for spec in specs), "]"]


def _parameter(key: str, value: object) -> list[str]:
    text = str(value).lower() if isinstance(value, bool) else value
    setting = SETTINGS[key]
    notes = textwrap.wrap(setting.description, 116)
    if setting.choices:
        notes.append(f"Allowed: {setting.allowed}.")
    return [
        "",
        *(f"# {line}" for line in notes),
        f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}',
    ]
