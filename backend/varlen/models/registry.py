"""The families that are served, by the `model_type` of their config.json."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from varlen.errors import CheckpointError
from varlen.models.bert import load_bert
from varlen.models.checkpoint import Checkpoint
from varlen.models.heads import Heads
from varlen.program.program import Value
from varlen.program.recorder import Recorder


class Encoder(Protocol):
    """A loaded encoder of some family."""

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""

    @property
    def type_vocab_size(self) -> int:
        """Token types below this are valid."""

    @property
    def heads(self) -> Heads:
        """The layers on top of it."""

    def record(self, ops: Recorder) -> Value:
        """Record the encoder and return its last hidden state, `[tokens, hidden]`."""


Load: TypeAlias = Callable[[Checkpoint, torch.dtype, torch.device], Encoder]

FAMILIES: dict[str, Load] = {"bert": load_bert}


def load_encoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Encoder:
    """Return the encoder of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: its family is not served, or its weights do not fit its config.json.
    """
    family = checkpoint.config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f'config.json has model_type "{family}"; this version serves: {", ".join(FAMILIES)}'
        )
    return FAMILIES[family](checkpoint, dtype, device)
