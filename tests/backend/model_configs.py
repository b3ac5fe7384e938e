"""Model configurations as the server passes them: config.pbtxt as JSON."""

import json
from types import SimpleNamespace

from varlen.models.checkpoint.family import NO_LABELS
from varlen.models.checkpoint.vector_layers import SpladeConfig
from varlen.server.config import tensor_entry, tensors_of


def model_config(task="embed", *, hidden=24, labels=0, parameters=None, **changes):
    """Return a complete configuration."""
    checkpoint = SimpleNamespace(
        hidden_size=hidden,
        vector_size=lambda _: hidden,
        m3=None,
        vocab_size=60,
        splade=SpladeConfig(),
        num_labels=labels,
        labels=NO_LABELS,
        normalize=False,
        rounds=False,
    )
    inputs, outputs = tensors_of(task, checkpoint)
    return {
        "name": "m",
        "max_batch_size": 64,
        "input": [tensor_entry(spec) | {"optional": spec.optional} for spec in inputs],
        "output": [tensor_entry(spec) for spec in outputs],
        "parameters": {key: {"string_value": value} for key, value in (parameters or {}).items()},
        **changes,
    }


def initialize_args(given):
    """Return the arguments of `initialize` for a configuration."""
    return {
        "model_config": json.dumps(given),
        "model_name": "m",
        "model_version": "3",
        "model_instance_name": "m_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
