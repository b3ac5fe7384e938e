"""The tensors of a task as config.pbtxt declares them."""

from dataclasses import dataclass, replace
from functools import cache

from varlen.tasks import TASKS, Task, Tensor, further_names


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of config.pbtxt; `dims` do not include the rows."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False


@cache
def input_specs(task: Task) -> tuple[TensorSpec, ...]:
    """Return the inputs of a task, all optional."""
    return tuple(_spec(tensor, optional=True) for tensor in TASKS[task].inputs)


@cache
def output_specs(task: Task, width: int = -1) -> tuple[TensorSpec, ...]:
    """Return the outputs of a task, in the order of a response.

    The width is the number of features or labels of the model.
    """
    return tuple(_spec(tensor, width) for tensor in TASKS[task].outputs)


def further_specs(task: Task, width: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of a task as further outputs of a model."""
    names = further_names(task)
    return tuple(replace(_spec(names[name], width), name=name) for name in names)


def _spec(tensor: Tensor, width: int = -1, *, optional: bool = False) -> TensorSpec:
    sizes = {"1": 1, "features": width, "labels": width}
    dims = tuple(sizes.get(name, -1) for name in tensor.shape if name != "rows")
    data_type = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return TensorSpec(tensor.name, f"TYPE_{data_type}", dims, optional)
