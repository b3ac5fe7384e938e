"""Settings and checks of a config.pbtxt.

Fields that only tune the server or that no python backend reads (optimization, metric_tags, version_policy, ...) pass.
Fields of files that are kept from another backend are served where answers stay right, and a line of the log says what
happens instead. Fields that would change answers are refused, all in one error.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from varlen.config import EngineConfig, collect_problems
from varlen.errors import CheckpointError, ConfigError, shorten
from varlen.models.checkpoint_folder import Checkpoint
from varlen.server.kinds import kind_of
from varlen.tasks import Task, TensorSpec, input_specs
from varlen.wire.outputs import ModelOutputs

Specs: TypeAlias = tuple[TensorSpec, ...]

# Sections of config.pbtxt that are refused whenever they are present, with the reason.
_REFUSED = {
    "sequence_batching": "its state per client has no meaning here, and requests of several rows would fail",
    "batch_input": "varlen does not read it",
    "batch_output": "varlen does not write it",
}

_ON_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"
# Settings that decide what a checkpoint is read as.
_OF_CHECKPOINT = ("task", "outputs", "ignore_config_fields", "adapter", "rerank_form")
# Size of our response cache for a model with `response_cache { enable: true }` and no size.
RESPONSE_CACHE_BYTES = 67_108_864


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a config.pbtxt and its checkpoint say about a model.

    `notes` are lines of the log, one for each field of config.pbtxt that acts otherwise than its name says.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    task: Task
    notes: tuple[str, ...]


def read_model(
    model_config: dict[str, Any],
    open_checkpoint: Callable[[EngineConfig], Checkpoint],
    *,
    is_complete: bool = True,
    server_caches: bool = False,
) -> ServedModel:
    """Return what a config.pbtxt and its checkpoint say about a model.

    Args:
        is_complete: whether absent inputs, outputs and `max_batch_size` stay absent.
        server_caches: whether the server has a response cache.

    Raises:
        ConfigError: names all problems, also of the checkpoint.
    """
    # the names of all settings follow an unknown one: last
    problems = [*_server_problems(model_config, server_caches=server_caches)]
    of_settings: list[str] = []
    texts = _parameter_texts(model_config)
    config, checkpoint, task = EngineConfig(), None, None
    with collect_problems(of_settings):
        config = EngineConfig.from_parameters(texts)
    known = None
    # wrong ones are among the problems: what the checkpoint is read as is then unknown
    with suppress(ConfigError):
        known = EngineConfig.from_parameters(
            {key: texts[key] for key in _OF_CHECKPOINT if key in texts}
        )
    if known is not None:
        try:
            with collect_problems(problems):
                checkpoint = open_checkpoint(known)
                task = known.task or checkpoint.task
                checkpoint.check_outputs(task, known.further_tasks)
        except CheckpointError as error:
            problems.append(str(error))
    if checkpoint is not None and task is not None:
        problems += _task_problems(model_config, task)
        assert known is not None
        tensors = tensors_of(task, checkpoint, known.further_tasks)
        problems += _tensor_problems(model_config, tensors, task)
        if is_complete:
            problems += _absence_problems(model_config, tensors, task)
    problems += of_settings
    if problems or checkpoint is None or task is None:
        raise ConfigError(*problems)
    if _caches(model_config) and "response_cache_bytes" not in texts:
        config = replace(config, response_cache_bytes=RESPONSE_CACHE_BYTES)
    return ServedModel(config, checkpoint, task, tuple(_notes(model_config, config, task)))


def gpu_of_instance(args: dict[str, str]) -> int:
    """Return the GPU number of a model instance; 0 for other kinds of instance.

    Args:
        args: the arguments that the server passes to `initialize`.
    """
    return int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else 0


def is_decoupled(model_config: dict[str, Any]) -> bool:
    """Return whether the model may send several responses to a request."""
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled"))


def num_warmup_requests(model_config: dict[str, Any]) -> int:
    """Return how many requests of `model_warmup` the server sends before it serves any other."""
    return sum(
        # without a count, a sample runs once; without rows, not at all
        (int(sample.get("count", 0)) or 1) * int(sample.get("batch_size", 0))
        for sample in model_config.get("model_warmup") or []
    )


def tensors_of(
    task: Task, checkpoint: Checkpoint, further: Sequence[Task] = ()
) -> tuple[Specs, Specs]:
    """Return the inputs and the outputs of a task, and the outputs of further tasks."""
    return input_specs(task), ModelOutputs.of(task, checkpoint, further).specs


def tensor_entry(spec: TensorSpec) -> dict[str, Any]:
    """Return a tensor as an entry of config.pbtxt in its JSON form."""
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _parameter_texts(model_config: dict[str, Any]) -> dict[str, str]:
    parameters = model_config.get("parameters") or {}
    return {key: value["string_value"] for key, value in parameters.items()}


def _caches(model_config: dict[str, Any]) -> bool:
    return bool((model_config.get("response_cache") or {}).get("enable"))


def _server_problems(model_config: dict[str, Any], *, server_caches: bool) -> Iterator[str]:
    """Yield settings of the server that lead to wrong answers or none, whatever the task."""
    if server_caches and _caches(model_config):
        yield (
            "response_cache is enabled, and this server has a cache (--cache-config), which ignores shapes and"
            " parameters and keeps errors: remove it, and set response_cache_bytes for varlen's own"
        )
    for section, reason in _REFUSED.items():
        # a message without fields is set too: `sequence_batching { }`; an empty list is not
        if section in model_config and model_config[section] != []:
            yield f"{section} is set; {reason}: remove it"
    value = _parameter_texts(model_config).get(_ON_CPU, "yes")
    if value != "yes":
        yield f'{_ON_CPU} is "{shorten(value)}"; allowed: yes. Inputs are read on the CPU: remove it'
    yield from _instance_problems(model_config.get("instance_group") or [])


def _task_problems(model_config: dict[str, Any], task: Task) -> Iterator[str]:
    kind = kind_of(task)
    if is_decoupled(model_config) and not kind.streams:
        yield "model_transaction_policy is decoupled; this model sends one response per request: remove it"
    rows = model_config["max_batch_size"]
    if rows and not kind.max_rows:
        yield f"max_batch_size is {rows}; a request of the task {task} holds one prompt: remove it"


def _tensor_problems(
    model_config: dict[str, Any], tensors: tuple[Specs, Specs], task: Task
) -> Iterator[str]:
    """Yield tensors that do not fit the task.

    They are unknown, have another type or shape, or are reshaped by the server; or no request can have the inputs that
    are there or required.
    """
    inputs, outputs = tensors
    for section, specs in (("input", inputs), ("output", outputs)):
        allowed = {spec.name: tensor_entry(spec) for spec in specs}
        for entry in model_config[section]:
            yield from _entry_problems(section, entry, allowed, task)
    entries = model_config["input"]
    known = {spec.name for spec in inputs}
    # an unknown name is a problem already
    if entries and all(entry["name"] in known for entry in entries):
        kinds = [kind for kind in kind_of(task).inputs if kind[0] in known]
        yield from _kind_problems(entries, kinds)


def _absence_problems(
    model_config: dict[str, Any], tensors: tuple[Specs, Specs], task: Task
) -> Iterator[str]:
    """Yield the absent fields that the server does not complete, with the lines to add."""
    inputs, outputs = tensors
    missing: dict[str, str] = {}
    if not model_config["max_batch_size"] and (max_rows := kind_of(task).max_rows):
        missing["max_batch_size"] = f"max_batch_size: {max_rows}"
    for section, specs in (("input", inputs), ("output", outputs)):
        if not model_config[section]:
            missing[section] = f"{section} [ {', '.join(map(entry_text, specs))} ]"
    if missing:
        yield (
            f"config.pbtxt has no {', no '.join(missing)}, and the server completes nothing"
            f" (--disable-auto-complete-config): add {' '.join(missing.values())}"
        )


def entry_text(spec: TensorSpec) -> str:
    """Return a tensor as an entry of config.pbtxt."""
    dims = ", ".join(map(str, spec.dims))
    optional = " optional: true" if spec.optional else ""
    return f'{{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {dims} ]{optional} }}'


def _entry_problems(
    section: str, entry: dict[str, Any], allowed: dict[str, dict[str, Any]], task: Task
) -> Iterator[str]:
    name = shorten(entry["name"])
    expected = allowed.get(entry["name"])
    if expected is None:
        yield f'{section} "{name}" is not a tensor of the task {task}; allowed: {", ".join(allowed)}'
        return
    came = {"data_type": entry["data_type"], "dims": [int(dim) for dim in entry["dims"]]}
    wanted = {"data_type": expected["data_type"], "dims": expected["dims"]}
    if came["data_type"] != wanted["data_type"] or not _dims_fit(
        came["dims"], wanted["dims"], is_input=section == "input"
    ):
        yield f'{section} "{name}" is {came}; the model has {wanted}'
    if "reshape" in entry:
        yield f'{section} "{name}" has a reshape; allowed: none, with dims {wanted["dims"]}'


def _dims_fit(came: list[int], wanted: list[int], *, is_input: bool) -> bool:
    """Return whether a tensor may have these dims.

    -1 fits every dim, since each request is checked by itself; and clients may pad all inputs to one length.
    """
    return len(came) == len(wanted) and all(
        dim in (-1, model) or (is_input and model == -1)
        for dim, model in zip(came, wanted, strict=True)
    )


def _kind_problems(
    entries: list[dict[str, Any]], kinds: Collection[tuple[str, ...]]
) -> Iterator[str]:
    """Yield why no request can have these inputs of config.pbtxt together."""
    names = {entry["name"] for entry in entries}
    leading = [kind[0] for kind in kinds]
    if names.isdisjoint(leading):
        yield f"input has {', '.join(sorted(names))}; a request needs one of: {', '.join(leading)}"
        return
    needed = [entry["name"] for entry in entries if not entry.get("optional")]
    needed_kinds = [kind for kind in kinds if not set(kind).isdisjoint(needed)]
    if len(needed_kinds) > 1:
        yield (
            f"the inputs {', '.join(needed)} are required; a request has only one of: {', '.join(leading)}."
            " Set optional: true"
        )
        return
    for kind in needed_kinds:
        if kind[0] not in names:
            [name, *_] = [name for name in needed if name in kind]
            yield f'input "{name}" is required without "{kind[0]}": add that or set optional: true'


def _instance_problems(groups: list[dict[str, Any]]) -> Iterator[str]:
    """Yield instances that cannot run, and two instances on one device."""
    instances: Counter[str] = Counter()
    for group in groups:
        if group.get("passive"):
            yield (
                "instance_group is passive; the first request to a model without another instance ends the server:"
                " remove it"
            )
        gpus = group.get("gpus") or []
        devices = [f"GPU {gpu}" for gpu in gpus] if group.get("kind") == "KIND_GPU" else ["the CPU"]
        for device in devices or ["each GPU"]:
            instances[device] += int(group.get("count", 1))
    for device, count in instances.items():
        if count > 1:
            yield (
                f"instance_group has {count} instances on {device}; allowed: 1. Each would load the weights"
                " again and have a queue of its own, and one instance uses the whole device: set count to 1"
            )


def _notes(model_config: dict[str, Any], config: EngineConfig, task: Task) -> Iterator[str]:
    """Yield what happens instead of what fields ask for."""
    if "dynamic_batching" in model_config:
        yield _batching_note(model_config["dynamic_batching"] or {})
    if any(group.get("rate_limiter") for group in model_config.get("instance_group") or []):
        yield (
            "rate_limiter limits nothing: the server ends the turn of a request when it enters varlen's queue, which"
            " max_queued_requests and max_queued_tokens limit"
        )
    if _caches(model_config):
        yield (
            "response_cache has no effect: answers of generation are not cached"
            if kind_of(task).streams
            else f"response_cache: varlen's own cache keeps answers, in up to {config.response_cache_bytes} bytes"
            " (response_cache_bytes)"
        )
    if num_warmup_requests(model_config):
        yield (
            "model_warmup is not needed: varlen warms up by itself. The server waits for its rows, and those that this"
            " model refuses are skipped"
        )


def _batching_note(section: dict[str, Any]) -> str:
    note = (
        "dynamic_batching has no use: varlen forms batches itself, from the rows of all requests."
    )
    if delay := int(section.get("max_queue_delay_microseconds", 0)):
        note += (
            f" The server still holds a request back for up to {delay} microseconds: remove"
            " max_queue_delay_microseconds."
        )
    if any(section.get(key) for key in ("default_queue_policy", "priority_levels")):
        note += (
            " Its priorities and queue policies rule the server's queue alone, which is nearly always empty: use"
            " request_priority, deadline_ms and max_queued_requests."
        )
    return note
