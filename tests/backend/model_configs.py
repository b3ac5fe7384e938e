"""Model configurations as the server passes them: config.pbtxt as JSON."""

from varlen import wire
from varlen.server_config import tensor_entry


def model_config(task="embed", *, hidden=24, labels=0, parameters=None, **changes):
    """Return a complete configuration."""
    return {
        "name": "m",
        "max_batch_size": 64,
        "input": [tensor_entry(spec) for spec in wire.input_specs(task)],
        "output": [tensor_entry(spec) for spec in wire.output_specs(task, hidden, labels)],
        "parameters": {key: {"string_value": value} for key, value in (parameters or {}).items()},
        **changes,
    }
