"""The padded ops as Triton kernels, with the names and signatures of `reference`."""

from varlen_bench.padded.packing import pack, unpack
from varlen_bench.padded.softmax import masked_softmax

__all__ = ["masked_softmax", "pack", "unpack"]
