"""The store of answers: its bound."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.cache.response_cache import ENTRY_BYTES, AnswerStore, CachedAnswer


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 300)), max_size=50),
    st.integers(0, 4000),
)
def test_its_bound_is_never_passed_whatever_the_sizes(answers, max_bytes):
    store = AnswerStore(lambda: 0.0, max_bytes=max_bytes, max_seconds=1.0)

    for key, width in answers:
        store.put(bytes([key]), CachedAnswer.of(np.zeros(width, dtype=np.float32)))

        kept = [answer for key in range(21) if (answer := store.get(bytes([key]))) is not None]
        assert len(store) == len(kept)
        assert store.held_bytes == sum(len(each.values) + ENTRY_BYTES for each in kept)
        assert store.held_bytes <= max_bytes
