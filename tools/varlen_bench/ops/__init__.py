"""The table of op calls, which benchmarks, tuner, compile checks and tests read."""
