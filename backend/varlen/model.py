"""The file that Triton Inference Server imports; the code is in `varlen.server_model`."""

from varlen.server_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
