"""Limits of steps and sequences, and the refusal of requests that can never run."""

from dataclasses import dataclass

from varlen.errors import RequestError
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt
from varlen.scheduling.group_memory import GroupMemory
from varlen.scheduling.places import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step and of a sequence.

    Attributes:
        max_step_tokens: largest step, in tokens.
        inter_token_latency_seconds: target of the seconds of a step while sequences are streamed; 0 is no target.
        max_running_sequences: largest number of sequences that run at the same time, without `short_places`.
        max_sequence_tokens: longest sequence, prompt and generated tokens together.
        short_places: places beside them for short sequences.
        short_tokens: tokens of the longest short one, prompt and generated tokens together.
        stages: stages of the model's pipeline; as many steps of different sequences are in flight. 1 is no pipeline.
    """

    max_step_tokens: int
    inter_token_latency_seconds: float
    max_running_sequences: int
    max_sequence_tokens: int
    short_places: int
    short_tokens: int
    stages: int = 1

    @property
    def step_latency_seconds(self) -> float:
        """Target of the seconds between the ends of two steps.

        A sequence runs once in `stages` steps.
        """
        return self.inter_token_latency_seconds / self.stages

    def new_places(self) -> Places:
        """Return the places of running sequences, all free."""
        # each running sequence has a token in every step; in a pipeline, one step may be the only one in flight
        places = min(self.max_running_sequences, self.max_step_tokens)
        short_places = min(self.short_places, self.max_step_tokens - places)
        return Places(places, short_places, self.short_tokens)


def check_fits(
    row: int, prompt: Prompt, options: GenerationOptions, limits: StepLimits, memory: GroupMemory
) -> None:
    """Check that a prompt can run when nothing else does.

    Raises:
        RequestError: it is too long, has too many samples or beams, or needs too many KV blocks.
    """
    length = len(prompt.token_ids)
    if length + options.max_tokens > limits.max_sequence_tokens:
        raise RequestError(
            f"row {row}: the prompt has {length} tokens and max_tokens is {options.max_tokens};"
            f" this model takes at most {limits.max_sequence_tokens} in all"
        )
    name, branches = ("num_beams", options.num_beams) if options.num_beams > 1 else ("n", options.n)
    most = min(limits.max_running_sequences, limits.max_step_tokens)
    if branches > most:
        raise RequestError(
            f"{name} is {branches}; this model generates at most {most} sequences at a time"
        )
    # without reservations, samples that do not fit together run one after another; beams cannot
    shares = not memory.reserves and options.num_beams == 1
    needed = memory.need(prompt, options.max_tokens, 1 if shares else branches)
    blocks = memory.blocks
    if needed > blocks.num_blocks:
        raise RequestError(
            f"row {row}: {prompt.num_tokens} tokens and {branches} times max_tokens of {options.max_tokens} need"
            f" {needed} KV blocks of {blocks.block_size} tokens; this model has {blocks.num_blocks} (kv_bytes)"
        )
