"""Which groups run in a step, and how many tokens of each."""

from collections.abc import Iterable

from varlen.scheduling.groups import Group
from varlen.scheduling.sequence import Chunk


def groups_of_step(running: Iterable[Group], step_tokens: int) -> list[Group]:
    """Return the running groups that fit into a step; the first one always does."""
    groups: list[Group] = []
    tokens = 0
    for group in running:
        tokens += group.least_tokens
        if groups and tokens > step_tokens:
            break
        groups.append(group)
    return groups


def divide_step(groups: list[Group], step_tokens: int) -> list[int]:
    """Return the number of tokens of each branch of the groups.

    Each has one, and prompts divide the rest in order. A prompt takes at most half of what is left while another
    one is behind it, so that a short prompt does not wait for a long one; what the others do not need, it takes
    as well.
    """
    spare = max(0, step_tokens - sum(group.least_tokens for group in groups))
    wanted = [group.remaining - 1 for group in groups]
    behind = sum(tokens > 0 for tokens in wanted)
    lengths = []
    for tokens in wanted:
        behind -= tokens > 0
        more = min(tokens, spare // 2 if behind else spare)
        lengths.append(1 + more)
        spare -= more
    for place, tokens in enumerate(wanted):
        more = min(tokens + 1 - lengths[place], spare)
        lengths[place] += more
        spare -= more
    return lengths


def next_chunks(group: Group, tokens: int, num_blocks: int) -> list[Chunk]:
    """Return the next tokens of each branch of a group."""
    first = group.first
    begin, end = first.num_computed, first.num_computed + tokens
    has_logits, has_beams = end == len(first.token_ids), group.has_beams
    samples = group.sequences if has_logits else ()
    source = first.prompt.source_ids
    source_block_ids = tuple(group.source_block_ids)
    encodes = () if group.is_encoded or source is None else tuple(source.tolist())
    return [
        Chunk(
            branch,
            begin,
            tuple(branch.token_ids[begin:end]),
            # it has more of them after a larger step that ran out of memory
            tuple(branch.block_ids[:num_blocks]),
            (branch,) if has_beams and has_logits else samples,
            source_block_ids,
            encodes,
        )
        for branch in group.branches
    ]
