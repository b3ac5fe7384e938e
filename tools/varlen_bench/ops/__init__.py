"""The registry of op calls: each op at a shape and dtype, with its inputs, its exact result and what it must move.

Benchmarks, the tuner, the compile checks and the tests of kernels read it.
"""
