"""Model repositories of the systems, written from nothing but a checkpoint.

The plain peers take what the server's dynamic batcher gives them. It puts requests together only if their shapes are
equal, unless an input says `allow_ragged_batch`; with it a python backend gets requests of every length and fills up
to the longest that is there. The other way that is in use, clients that fill up to the model's longest, computes that
many tokens for each request, so ragged is the better one for the peer. No request waits for others while the model is
idle (`max_queue_delay_microseconds: 0`): what has come while it was busy is the next batch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from varlen_bench.serving.client import INPUT, OUTPUT
from varlen_bench.serving.systems import System

_PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is served.

    Attributes:
        folder: as Hugging Face saves it.
        exports: the same in an engine's own format, by engine; for others the folder is used.
        max_tokens: longest sequence.
        peer_batch: most requests that the dynamic batcher puts together.
        threads: of a batch.
        warmup_seconds: most that ours may spend on measuring what batches cost, at its first start.
    """

    folder: Path
    exports: Mapping[str, Path]
    max_tokens: int
    peer_batch: int
    threads: int
    warmup_seconds: int

    @property
    def hidden(self) -> int:
        """Width of an embedding."""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return int(config["hidden_size"])


def write_model(repository: Path, system: System, checkpoint: Checkpoint) -> None:
    """Write the model that serves a checkpoint as a system does; it is called like the system."""
    model = repository / system.name
    model.mkdir(parents=True)
    if system.is_ours:
        (model / "1").symlink_to(checkpoint.folder.resolve(), target_is_directory=True)
        config = _varlen_config(system, checkpoint)
    else:
        (model / "1").mkdir()
        shutil.copy(_PEERS / f"{system.engine}_model.py", model / "1" / "model.py")
        config = _peer_config(system, checkpoint)
    (model / "config.pbtxt").write_text(config, encoding="utf-8")


def _varlen_config(system: System, checkpoint: Checkpoint) -> str:
    parameters = {
        "task": "embed",
        "device": "cpu",
        "threads": str(checkpoint.threads),
        "max_sequence_tokens": str(checkpoint.max_tokens),
        "warmup_seconds": str(checkpoint.warmup_seconds),
        **system.parameters,
    }
    return _config("varlen", 64, checkpoint.hidden, parameters, kind="KIND_CPU")


def _peer_config(system: System, checkpoint: Checkpoint) -> str:
    folder = checkpoint.exports.get(system.engine, checkpoint.folder)
    parameters = {
        "checkpoint": str(folder.resolve()),
        "dtype": system.dtype,
        "threads": str(checkpoint.threads),
    }
    if not system.dynamic:
        return _config("python", 1, checkpoint.hidden, parameters)
    batcher = "dynamic_batching { max_queue_delay_microseconds: 0 }"
    return (
        _config(
            "python",
            checkpoint.peer_batch,
            checkpoint.hidden,
            parameters,
            "allow_ragged_batch: true",
        )
        + f"{batcher}\n"
    )


def _config(
    backend: str,
    max_batch_size: int,
    hidden: int,
    parameters: Mapping[str, str],
    input_field: str = "",
    *,
    kind: str = "KIND_CPU",
) -> str:
    ragged = f" {input_field}" if input_field else ""
    lines = [
        f'backend: "{backend}"',
        f"max_batch_size: {max_batch_size}",
        f'input [ {{ name: "{INPUT}" data_type: TYPE_INT64 dims: [ -1 ]{ragged} }} ]',
        f'output [ {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ {hidden} ] }} ]',
        f"instance_group [ {{ count: 1 kind: {kind} }} ]",
    ]
    lines += [
        f'parameters {{ key: "{key}" value: {{ string_value: {json.dumps(value)} }} }}'
        for key, value in parameters.items()
    ]
    return "\n".join(lines) + "\n"
