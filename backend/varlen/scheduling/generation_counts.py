"""What a scheduler of generation does now, and has done so far."""

from dataclasses import dataclass

from varlen.memory.blocks import BlockCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCounts:
    """What a scheduler does now, and has done so far.

    Attributes:
        running, waiting: sequences; of samples of one prompt, each counts.
        blocks: use of KV memory.
        prefill_tokens: tokens of prompts that have run, and of preempted sequences that ran again.
        decode_tokens: generated tokens that have run.
        memory_preemptions: number of times that sequences gave back their blocks because there were too few.
        order_preemptions: number of times that sequences gave back their blocks to a request before them.
    """

    running: int
    waiting: int
    blocks: BlockCounts
    prefill_tokens: int
    decode_tokens: int
    memory_preemptions: int
    order_preemptions: int

    @property
    def preemptions(self) -> int:
        """Number of times that sequences gave back their blocks."""
        return self.memory_preemptions + self.order_preemptions
