"""Registry of op calls: an op at one shape, with inputs and exact result.

Benchmarks, the tuner, the compile checks and the kernel tests read it.
"""
