"""What a config.pbtxt may say: read into settings, and checked against the model it is to serve."""

from typing import Any

from varlen import wire
from varlen.config import EngineConfig, Task
from varlen.errors import ConfigError
from varlen.models.checkpoint import Checkpoint


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
    """Return the GPU that the server gave to a model instance; 0 for an instance of kind CPU, which may still use one.

    Args:
        args: what the server hands to `initialize`.
    """
    return int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else 0


def check_server_settings(model_config: dict[str, Any]) -> None:
    """Refuse settings of config.pbtxt with which the server would give wrong answers, or none.

    Raises:
        ConfigError: one is there; the message says why it cannot be.
    """
    if (model_config.get("response_cache") or {}).get("enable"):
        raise ConfigError(
            "response_cache is enabled; the server's cache ignores shapes and parameters and keeps errors: remove it"
        )
    if (model_config.get("model_transaction_policy") or {}).get("decoupled"):
        raise ConfigError(
            "model_transaction_policy is decoupled; this model gives one answer: remove it"
        )
    if not model_config["max_batch_size"]:
        raise ConfigError("max_batch_size is 0; a row is a sequence, so allow at least 1")


def check_tensors(model_config: dict[str, Any], checkpoint: Checkpoint, task: Task) -> None:
    """Refuse a complete config.pbtxt whose tensors are not those of the task.

    Raises:
        ConfigError: a tensor is unknown, or has another type or shape.
    """
    for section, specs in (
        ("input", wire.input_specs(task)),
        ("output", wire.output_specs(task, checkpoint.hidden_size, checkpoint.num_labels)),
    ):
        allowed = {spec.name: tensor_entry(spec) for spec in specs}
        for entry in model_config[section]:
            expected = allowed.get(entry["name"])
            if expected is None:
                raise ConfigError(
                    f'{section} "{entry["name"]}" is not one of the task {task}; allowed: {", ".join(allowed)}'
                )
            came = {"data_type": entry["data_type"], "dims": [int(dim) for dim in entry["dims"]]}
            wanted = {"data_type": expected["data_type"], "dims": expected["dims"]}
            if came != wanted:
                raise ConfigError(f'{section} "{entry["name"]}" is {came}; the model has {wanted}')


def tensor_entry(spec: wire.TensorSpec) -> dict[str, Any]:
    """Return a tensor as an entry of config.pbtxt in its JSON form."""
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}
