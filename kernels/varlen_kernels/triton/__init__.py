"""The kernels in the Triton language, one file for each op."""
