"""The table of functions that one call runs: its columns, and the dtypes of tensors."""

from collections.abc import Mapping

import torch

# Columns of a table: the address of a function, its number of units, the number of parts that threads take, and its
# arguments.
FUNCTION, UNITS, PARTS, ARGUMENTS = range(4)

# Of tensors, by letter.
DTYPES: Mapping[str, torch.dtype] = {
    "f": torch.float32,
    "e": torch.float64,
    "?": torch.bool,
    "b": torch.int8,
    "u": torch.uint8,
    "i": torch.int32,
    "l": torch.int64,
}
