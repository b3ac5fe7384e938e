"""The table of op calls, which benchmarks, the tuner, the compile checks and the kernel tests read."""
