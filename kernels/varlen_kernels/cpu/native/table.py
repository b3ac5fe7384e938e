"""Columns of the table of functions that one call runs.

The address of a function, its number of units, the number of parts that threads take, and its arguments.
"""

FUNCTION, UNITS, PARTS, ARGUMENTS = range(4)
