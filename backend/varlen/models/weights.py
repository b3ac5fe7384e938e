"""Tensors of a checkpoint by name, from one safetensors file or from shards.

safetensors is a header and raw bytes: nothing in it is executed. Files are memory-mapped, so a tensor
is read when it is asked for.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from varlen.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointWeights:
    """The tensors of one checkpoint folder; a context manager that keeps its files mapped."""

    def __init__(self, folder: Path) -> None:
        """Map the files.

        Raises:
            CheckpointError: there is no safetensors file, or one is damaged or missing.
        """
        self._files = ExitStack()
        self._holder = {}
        for path in shards(folder):
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path.name} cannot be read: {error}") from None
            self._holder.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> "CheckpointWeights":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._holder

    def read(self, name: str, *shape: int) -> Tensor:
        """Return the tensor called `name`: a view of its file, which stays mapped as long as the view is kept.

        Raises:
            CheckpointError: it is missing or has another shape than config.json implies.
        """
        if name not in self._holder:
            raise CheckpointError(f'the checkpoint has no tensor "{name}"')
        tensor: Tensor = self._holder[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f'the tensor "{name}" has shape {list(tensor.shape)}; config.json implies {list(shape)}'
            )
        return tensor


def shards(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or the index that names them is damaged.
    """
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(
            f"{folder} has no {_SINGLE} and no {_INDEX}; pickled weights (*.bin) are not read"
        )
    try:
        names = set(
            json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        )
        outside = any(Path(name).name != name for name in names)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{_INDEX} is damaged: {error}") from None
    if outside:
        raise CheckpointError(f"{_INDEX} names a file outside the checkpoint folder")
    return [folder / name for name in sorted(names)]
