"""Model repositories of the systems, written from a checkpoint.

`allow_ragged_batch` lets the dynamic batcher join requests of different lengths; the peer pads them to the longest.
`max_queue_delay_microseconds: 0`: no request waits while the model is idle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.peers.checkpoints import config_field
from varlen_bench.peers.exports import exported
from varlen_bench.serving.systems import INPUT, OUTPUT, ServedSystem, Settings

PEER = Path(__file__).with_name("padded_model.py")


def write_models(repository: Path, system: ServedSystem, settings: Settings) -> None:
    """Write the models of a system."""
    for name in system.models:
        _write_model(repository / name, system, settings)


def _write_model(model: Path, system: ServedSystem, settings: Settings) -> None:
    model.mkdir(parents=True)
    if system.is_ours:
        (model / "1").symlink_to(settings.model.resolve(), target_is_directory=True)
        parameters = {
            "task": "embed",
            "device": "cpu",
            "threads": str(settings.threads),
            "max_sequence_tokens": str(Checkpoint.open(settings.model).position_limit),
            "warmup_seconds": "2" if settings.quick else "20",
            **system.parameters,
        }
    else:
        (model / "1").mkdir()
        shutil.copy(PEER, model / "1" / "model.py")
        checkpoint = exported(settings.model, system.engine, system.precision)
        parameters = {
            "engine": system.engine,
            "checkpoint": str(checkpoint.resolve()),
            "precision": system.precision,
            "threads": "1" if system.per_core else str(settings.threads),
        }
    (model / "config.pbtxt").write_text(_config(system, settings, parameters), encoding="utf-8")


def _config(system: ServedSystem, settings: Settings, parameters: Mapping[str, str]) -> str:
    peer_batch = settings.peer_batch if system.dynamic else 1
    ragged = "allow_ragged_batch: true" if system.dynamic else ""
    hidden = config_field(settings.model, "hidden_size")
    instances = settings.threads if system.per_core else 1
    lines = [
        f'backend: "{"varlen" if system.is_ours else "python"}"',
        f"max_batch_size: {64 if system.is_ours else peer_batch}",
        f'input [ {{ name: "{INPUT}" data_type: TYPE_INT64 dims: [ -1 ] {ragged} }} ]',
        f'output [ {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ {hidden} ] }} ]',
        f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]",
        "dynamic_batching { max_queue_delay_microseconds: 0 }" if system.dynamic else "",
    ]
    lines += [
        f'parameters {{ key: "{key}" value: {{ string_value: {json.dumps(value)} }} }}'
        for key, value in parameters.items()
    ]
    return "\n".join(lines) + "\n"
