"""The shared memory through which the ranks of a model exchange numbers.

It is a tensor of int64, all 0 at first: a line for the group, a line for each rank, then two buffers for each rank.
An exchange that needs more than a buffer is done in several turns, so the memory does not grow with a batch.
"""

# Words of a cache line: no two ranks write into one.
LINE_WORDS = 8
# Size of a buffer of one rank: small enough for a core's cache, large enough that few turns are needed.
BUFFER_BYTES = 1 << 18
# In the group's line: 1 + the number of a rank that another one waited for too long, or 0; from then on nothing waits.
FAILED = 0
# In the group's line: the longest wait of a rank for another one, in nanoseconds.
LONGEST_WAIT = 1
# In a rank's line: the number of turns that it has brought its numbers to.
TURNS = 0


def rank_words(size: int) -> int:
    """Return the number of words of the memory of `size` ranks."""
    return LINE_WORDS * (1 + size) + 2 * size * BUFFER_BYTES // 8
