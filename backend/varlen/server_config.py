"""Settings and checks of a config.pbtxt.

Fields that only tune the server or that no python backend reads (optimization, metric_tags, model_warmup,
version_policy, ...) pass. Fields that would change answers, or that have no effect although the operator relies on
them, are refused.
"""

from collections import Counter
from typing import Any, TypeAlias

from varlen import wire, wire_generate
from varlen.config import ITERATIVE_TASKS, EngineConfig, Task
from varlen.errors import ConfigError, shorten
from varlen.models.checkpoint import Checkpoint
from varlen.wire_outputs import ModelOutputs, TensorSpec

Specs: TypeAlias = tuple[TensorSpec, ...]

# Sections of config.pbtxt that are refused whenever they are present, with the reason.
_REFUSED = {
    "sequence_batching": "its state per client has no meaning here, and requests of several rows would fail",
    "dynamic_batching": "varlen forms batches itself, from its own queue",
    "batch_input": "varlen does not read it",
    "batch_output": "varlen does not write it",
}


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
    _check_instances(model_config.get("instance_group") or [])


def check_tensors(model_config: dict[str, Any], checkpoint: Checkpoint, task: Task) -> None:
    """Refuse a config.pbtxt whose tensors are not those of the task.

    Raises:
        ConfigError: a tensor is unknown, has another type or shape, or is reshaped by the server.
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


def tensors_of(task: Task, checkpoint: Checkpoint) -> tuple[Specs, Specs]:
    """Return the inputs and the outputs of a task."""
    if task in ITERATIVE_TASKS:
        return wire_generate.INPUTS, wire_generate.OUTPUTS
    return wire.input_specs(task), ModelOutputs.of(task, checkpoint).specs


def tensor_entry(spec: TensorSpec) -> dict[str, Any]:
    """Return a tensor as an entry of config.pbtxt in its JSON form."""
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _check_instances(groups: list[dict[str, Any]]) -> None:
    """Refuse two instances on one device."""
    instances: Counter[str] = Counter()
    for group in groups:
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
