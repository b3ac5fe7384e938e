"""The file that Triton Inference Server imports; the code is in `varlen.server.entry`."""

from varlen.server.entry import TritonPythonModel

__all__ = ["TritonPythonModel"]
