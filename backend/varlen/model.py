"""The file that Triton Inference Server imports; everything stands in `varlen.server_model`."""

from varlen.server_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
