"""Bodies of compiled functions, by group of ops: rows of `op_table` name them.

A row or a token has the same result by itself and among others, and on any number of threads, to the last bit.
"""
