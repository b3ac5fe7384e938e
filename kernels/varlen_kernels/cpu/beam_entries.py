"""The functions of searches with beams, see `entries`."""

from varlen_kernels.cpu.arguments import (
    address,
    bytes_of,
    columns_of,
    fp32,
    fp32_numbers,
    id_rows,
    ids_of,
    long_ids_of,
    number,
)
from varlen_kernels.cpu.beam import step_sequences
from varlen_kernels.cpu.beam_search import advance_some_searches, follow_some_beams
from varlen_kernels.cpu.native import inlined, int32_matrices


@inlined
def step_beams(arguments, first, last):
    """Write the best candidates of some sequences."""
    # logits, scores, finished, bounds of the edits of rows, their tokens and factors, tokens, parents, scores; a unit
    # is a sequence
    return step_sequences(
        first,
        last,
        fp32(arguments, 0),
        fp32(arguments, 1),
        bytes_of(arguments, 2),
        long_ids_of(arguments, 3),
        ids_of(arguments, 4),
        fp32_numbers(arguments, 5),
        id_rows(arguments, 6),
        id_rows(arguments, 7),
        fp32(arguments, 8),
    )


@inlined
def follow_beams(arguments, first, last):
    """Give the beams of some searches their tokens and block tables."""
    # searches, places, given, context_lens, cu_blocks; tables, parents, tokens, token_ids, block_ids, slots, copies;
    # block_size; a unit is a search
    count = columns_of(arguments, 6)
    blocks = columns_of(arguments, 5) // count
    return follow_some_beams(
        first,
        last,
        id_rows(arguments, 0),
        ids_of(arguments, 1),
        id_rows(arguments, 2),
        ids_of(arguments, 3),
        ids_of(arguments, 4),
        int32_matrices(address(arguments, 5), 2, count, blocks),
        id_rows(arguments, 6),
        id_rows(arguments, 7),
        ids_of(arguments, 8),
        ids_of(arguments, 9),
        long_ids_of(arguments, 10),
        id_rows(arguments, 11),
        number(arguments, 36),
    )


@inlined
def advance_searches(arguments, first, last):
    """Choose the beams and the answers of some searches."""
    # tokens, log probabilities, searches, places, divisors, ends; parents, tokens, scores, answers, answer_scores,
    # num_answers; heads; ends, beams, scores; a unit is a search
    return advance_some_searches(
        first,
        last,
        id_rows(arguments, 0),
        fp32(arguments, 1),
        id_rows(arguments, 2),
        ids_of(arguments, 3),
        fp32(arguments, 4),
        ids_of(arguments, 5),
        id_rows(arguments, 6),
        id_rows(arguments, 7),
        fp32(arguments, 8),
        int32_matrices(address(arguments, 9), 2, columns_of(arguments, 6), 3),
        fp32(arguments, 10),
        id_rows(arguments, 11),
        ids_of(arguments, 12),
        id_rows(arguments, 13),
        id_rows(arguments, 14),
        fp32_numbers(arguments, 15),
    )
