"""Settings of SPLADE pooling: how logits become weights of terms.

Source: Formal et al. 2021, arXiv:2109.10086; the fields follow SpladePooling in sentence-transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from varlen.models.checkpoint.config_file import check_fields, read_choice, read_object
from varlen_kernels import TermPooling

_POOLINGS: Mapping[str, TermPooling] = {"max": "max", "sum": "sum"}
# How often log(1 + ...) is applied. Source of the second: arXiv:2504.14839.
_LOGS: Mapping[str, int] = {"relu": 1, "log1p_relu": 2}
# embedding_dimension is the number of terms, or null.
_KNOWN = (
    "pooling_strategy",
    "activation_function",
    "embedding_dimension",
    "word_embedding_dimension",
)


@dataclass(frozen=True, slots=True)
class SpladeConfig:
    """How weights of terms are made.

    Attributes:
        pooling: pooling over the tokens of a sequence.
        logs: number of times that log(1 + ...) is applied to a positive logit.
        max_active_dims: number of largest weights to keep in a vector, unless a request says it; None is all.
    """

    pooling: TermPooling = "max"
    logs: int = 1
    max_active_dims: int | None = None


def read_splade(folder: Path, path: str, max_active_dims: int | None) -> SpladeConfig:
    """Return the settings of a SpladePooling module.

    Args:
        path: path of the module's folder, relative to the checkpoint.

    Raises:
        CheckpointError: its file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    check_fields(config, name, known=_KNOWN, fixed={})
    return SpladeConfig(
        read_choice(config, "pooling_strategy", _POOLINGS, default="max", name=name),
        read_choice(config, "activation_function", _LOGS, default="relu", name=name),
        max_active_dims,
    )
