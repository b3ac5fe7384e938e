"""Settings and checks of a config.pbtxt.

Fields that only tune the server or that no python backend reads (optimization, metric_tags, model_warmup,
version_policy, ...) pass. Fields that would change answers, or that have no effect although the operator relies on
them, are refused.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any, TypeAlias

from varlen.config import EngineConfig
from varlen.errors import ConfigError, shorten
from varlen.models.checkpoint_folder import Checkpoint
from varlen.tasks import ITERATIVE_TASKS, Task
from varlen.wire import generate as wire_generate
from varlen.wire.outputs import ModelOutputs
from varlen.wire.specs import TensorSpec, input_specs, output_specs

Specs: TypeAlias = tuple[TensorSpec, ...]

# Sections of config.pbtxt that are refused whenever they are present, with the reason.
_REFUSED = {
    "sequence_batching": "its state per client has no meaning here, and requests of several rows would fail",
    "dynamic_batching": "varlen forms batches itself, from its own queue",
    "batch_input": "varlen does not read it",
    "batch_output": "varlen does not write it",
}

# Kinds of input. A request has one of them, and always the first name of that.
_ROW_KINDS = (("text", "text_pair"), ("input_ids", "attention_mask", "token_type_ids"))
_PROMPT_KINDS = tuple((name,) for name in wire_generate.PROMPTS)
_ON_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"


def engine_config(model_config: dict[str, Any]) -> EngineConfig:
    """Return the engine's settings, from the `parameters` of a config.pbtxt in its JSON form.

    Raises:
        ConfigError: see `EngineConfig.from_parameters`.
    """
    parameters = model_config.get("parameters") or {}
    return EngineConfig.from_parameters(
        {key: value["string_value"] for key, value in parameters.items()}
    )


def gpu_of_instance(args: dict[str, str]) -> int:
    """Return the GPU number of a model instance; 0 for other kinds of instance.

    Args:
        args: the arguments that the server passes to `initialize`.
    """
    return int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else 0


def is_decoupled(model_config: dict[str, Any]) -> bool:
    """Return whether the model may send several responses to a request."""
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled"))


def check_server_settings(model_config: dict[str, Any], task: Task) -> None:
    """Refuse settings of config.pbtxt that lead to wrong answers or none.

    Raises:
        ConfigError: one is set; the message gives the reason.
    """
    if (model_config.get("response_cache") or {}).get("enable"):
        raise ConfigError(
            "response_cache is enabled; the server's cache ignores shapes and parameters and keeps errors: remove it"
        )
    if is_decoupled(model_config) and task not in ITERATIVE_TASKS:
        raise ConfigError(
            "model_transaction_policy is decoupled; this model sends one response per request: remove it"
        )
    rows = model_config["max_batch_size"]
    if not rows and task not in ITERATIVE_TASKS:
        raise ConfigError("max_batch_size is 0; a row is a sequence, so allow at least 1")
    if rows and task in ITERATIVE_TASKS:
        raise ConfigError(
            f"max_batch_size is {rows}; a request of the task {task} holds one prompt: remove it"
        )
    for section, reason in _REFUSED.items():
        # a message without fields is set too: `dynamic_batching { }`; an empty list is not
        if section in model_config and model_config[section] != []:
            raise ConfigError(f"{section} is set; {reason}: remove it")
    _check_inputs_on_cpu(model_config.get("parameters") or {})
    _check_instances(model_config.get("instance_group") or [])


def check_tensors(model_config: dict[str, Any], checkpoint: Checkpoint, task: Task) -> None:
    """Refuse a config.pbtxt whose tensors do not fit the task.

    Raises:
        ConfigError: a tensor is unknown, has another type or shape, or is reshaped by the server; or no request can
            have the inputs that are there or required.
    """
    inputs, outputs = tensors_of(task, checkpoint)
    for section, specs in (("input", inputs), ("output", outputs)):
        allowed = {spec.name: tensor_entry(spec) for spec in specs}
        for entry in model_config[section]:
            name = shorten(entry["name"])
            expected = allowed.get(entry["name"])
            if expected is None:
                raise ConfigError(
                    f'{section} "{name}" is not a tensor of the task {task}; allowed: {", ".join(allowed)}'
                )
            came = {"data_type": entry["data_type"], "dims": [int(dim) for dim in entry["dims"]]}
            wanted = {"data_type": expected["data_type"], "dims": expected["dims"]}
            if came != wanted:
                raise ConfigError(f'{section} "{name}" is {came}; the model has {wanted}')
            if "reshape" in entry:
                raise ConfigError(
                    f'{section} "{name}" has a reshape; allowed: none, with dims {wanted["dims"]}'
                )
    kinds = _PROMPT_KINDS if task in ITERATIVE_TASKS else _ROW_KINDS
    _check_input_kinds(model_config["input"], kinds)


def tensors_of(task: Task, checkpoint: Checkpoint) -> tuple[Specs, Specs]:
    """Return the inputs and the outputs of a task."""
    if task in ITERATIVE_TASKS:
        return input_specs(task), output_specs(task)
    return input_specs(task), ModelOutputs.of(task, checkpoint).specs


def tensor_entry(spec: TensorSpec) -> dict[str, Any]:
    """Return a tensor as an entry of config.pbtxt in its JSON form."""
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _check_input_kinds(entries: list[dict[str, Any]], kinds: Collection[tuple[str, ...]]) -> None:
    """Refuse inputs that no request can have together.

    Args:
        entries: the inputs of config.pbtxt.
        kinds: see `_ROW_KINDS`.
    """
    names = {entry["name"] for entry in entries}
    leading = [kind[0] for kind in kinds]
    if names.isdisjoint(leading):
        raise ConfigError(
            f"input has {', '.join(sorted(names))}; a request needs one of: {', '.join(leading)}"
        )
    needed = [entry["name"] for entry in entries if not entry.get("optional")]
    needed_kinds = [kind for kind in kinds if not set(kind).isdisjoint(needed)]
    if len(needed_kinds) > 1:
        raise ConfigError(
            f"the inputs {', '.join(needed)} are required; a request has only one of: {', '.join(leading)}."
            " Set optional: true"
        )
    for kind in needed_kinds:
        if kind[0] not in names:
            [name, *_] = [name for name in needed if name in kind]
            raise ConfigError(
                f'input "{name}" is required without "{kind[0]}": add that or set optional: true'
            )


def _check_inputs_on_cpu(parameters: dict[str, Any]) -> None:
    """Refuse inputs in GPU memory, which `execute` cannot read."""
    value = parameters.get(_ON_CPU, {}).get("string_value", "yes")
    if value != "yes":
        raise ConfigError(
            f'{_ON_CPU} is "{shorten(value)}"; allowed: yes. Inputs are read on the CPU: remove it'
        )


def _check_instances(groups: list[dict[str, Any]]) -> None:
    """Refuse two instances on one device, and instances that cannot run or be limited."""
    instances: Counter[str] = Counter()
    for group in groups:
        if group.get("passive"):
            raise ConfigError(
                "instance_group is passive; the first request to a model without another instance ends the server:"
                " remove it"
            )
        if group.get("rate_limiter"):
            raise ConfigError(
                "instance_group has a rate_limiter; the server ends its turn when a request enters the queue of"
                " varlen, so it limits nothing: remove it"
            )
        gpus = group.get("gpus") or []
        devices = [f"GPU {gpu}" for gpu in gpus] if group.get("kind") == "KIND_GPU" else ["the CPU"]
        for device in devices or ["each GPU"]:
            instances[device] += int(group.get("count", 1))
    for device, count in instances.items():
        if count > 1:
            raise ConfigError(
                f"instance_group has {count} instances on {device}; allowed: 1. Each would load the weights"
                " again and have a queue of its own, and one instance uses the whole device: set count to 1"
            )
