"""The names of all ops that every kind of device has."""

from inspect import isfunction

from varlen_kernels import reference

# Ops of a model that several processes hold: on CPUs only, for no machine with two GPUs was available for tests.
RANK_OPS = {"all_reduce", "gather_columns", "local_ids"}
OPS = {name: op for name, op in vars(reference).items() if isfunction(op) and name not in RANK_OPS}
