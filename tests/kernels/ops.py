"""The names of all ops."""

from inspect import isfunction

from varlen_kernels import reference

OPS = {name: op for name, op in vars(reference).items() if isfunction(op)}
