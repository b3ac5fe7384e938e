# mypy: implicit-reexport
# ruff: noqa: F403  # the ops
"""Every op in plain torch: the specification of the kernels, and the CPU path.

All tokens of a batch are in one `[tokens, ...]` tensor, sequence after sequence; `cu_seqlens`
`[batch + 1]` int32 holds the start of each sequence and the end of the last. Each op computes in fp32 for
every dtype, writes into `out=` if it is given, and returns the tensor it wrote. The rows of
`op_table` say which argument `out` may be.
"""

from varlen_kernels.reference.every_op import *
