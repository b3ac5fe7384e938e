"""Adapters for tasks in a checkpoint: one of them is merged when weights are read.

Each weight has low-rank factors for every task, in the parametrizations of torch. Without an adapter the model is the
one that they were trained on.
Source: Hu et al. 2021, arXiv:2106.09685 (LoRA); Sturua et al. 2024, arXiv:2409.10173, and
jinaai/xlm-roberta-flash-implementation on the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import Json, read_int, read_number, show

if TYPE_CHECKING:
    from torch import Tensor

# Fields of config.json that say which adapters there are.
NAMES = "lora_adaptations"
FIELDS = frozenset({NAMES, "lora_alpha", "lora_rank"})
NO_ADAPTER = "none"
_MARK = ".parametrizations.weight.0."


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a checkpoint.

    Attributes:
        scale: multiplies their product.
    """

    number: int
    count: int
    rank: int
    scale: float

    def shapes(self, shape: tuple[int, ...], *, of_table: bool) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the factors A and B of a weight.

        Args:
            of_table: whether it is a table of embeddings, whose factors stand in the other order.
        """
        rows, columns = shape
        if of_table:
            return (self.count, rows, self.rank), (self.count, self.rank, columns)
        return (self.count, self.rank, columns), (self.count, rows, self.rank)

    def merged(self, weight: Tensor, factors: tuple[Tensor, Tensor], *, of_table: bool) -> Tensor:
        """Return a weight plus the product of its factors, in fp32.

        Args:
            weight: `[rows, columns]`.
            factors: A and B of all adapters, see `shapes`.
        """
        a, b = (each[self.number].float() for each in factors)
        product = a @ b if of_table else b @ a
        return weight.float().add_(product, alpha=self.scale)


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names of the factors A and B of a weight."""
    stem = weight.removesuffix(".weight") + _MARK
    return f"{stem}lora_A", f"{stem}lora_B"


def weight_of_factor(name: str) -> str | None:
    """Return the name of a factor's weight; None for another tensor."""
    stem, mark, _ = name.partition(_MARK)
    return f"{stem}.weight" if mark else None


def adapter_names(config: Json) -> tuple[str, ...]:
    """Return the names of the adapters in a config.json; none if it has none."""
    names = config.get(NAMES) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json has {NAMES} {show(names)}; allowed: a list of names")
    return tuple(names)


def read_adapter(config: Json, name: str) -> Adapter | None:
    """Return the adapter of this name; None for `NO_ADAPTER`.

    Raises:
        CheckpointError: the checkpoint has no such adapter.
    """
    names = adapter_names(config)
    if name == NO_ADAPTER:
        return None
    if name not in names:
        has = f"allowed: {', '.join((NO_ADAPTER, *names))}" if names else "this checkpoint has none"
        raise CheckpointError(f'adapter is "{name}"; {has}')
    rank = read_int(config, "lora_rank", default=4)
    scale = read_number(config, "lora_alpha", default=1.0) / rank
    return Adapter(names.index(name), len(names), rank, scale)
