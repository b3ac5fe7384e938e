"""The padded ops as Triton kernels, with the names and signatures of `reference`."""

from varlen_bench.padded.packing import pack, unpack

__all__ = ["pack", "unpack"]
