"""Chooses tokens in steps where some sequences are sampled and others are searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.decoding.checkpoint_rules import search_rules
from varlen.decoding.grammar.grammars import Grammars
from varlen.decoding.sampling.sampling import Sampler
from varlen.decoding.search.beam_search import BeamSearch, DeviceSearch
from varlen.decoding.search.searcher import Searcher
from varlen.decoding.token_edits import BadWords
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array, Int32Array, new_tuple
from varlen.scheduling.batch import Batch, Chunk, GeneratedSequence
from varlen.scheduling.device_plan import (
    BeamStep,
    Chosen,
    DevicePlan,
    Draws,
    EditLimits,
    SampledToken,
)
from varlen_kernels.functions import NOT_GIVEN

# Limits of a row that is not drawn.
_GREEDY = (0.0, 0, 1.0, 0.0)


class _Row(NamedTuple):
    """An output that the host chooses.

    Attributes:
        length: number of tokens of the answer, or of each beam.
        drafted: see `Chunk`.
    """

    output: int
    sequence: GeneratedSequence
    length: int
    rows: range
    drafted: tuple[int, ...]


class TokenChooser:
    """Chooses with a sampler or a searcher, sequence by sequence: a `Chooser`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        grammars: Grammars,
        bad_words: BadWords,
        device: torch.device,
        edit_limits: EditLimits,
    ) -> None:
        """Prepare the sampler and the searches.

        Raises:
            CheckpointError: its rules are not served.
        """
        vocab_size, rules = checkpoint.target_vocab_size, search_rules(checkpoint)
        translate = checkpoint.translate
        renormalizes = translate is not None and translate.defaults.renormalize_logits
        self._renormalizes = renormalizes
        self._sampler = Sampler(vocab_size, rules.end_ids, grammars, bad_words, device, edit_limits)
        self._searcher = Searcher(vocab_size, rules, bad_words, device, renormalizes=renormalizes)

    def plan(self, step: Batch) -> DevicePlan:
        """Return what the device chooses in a step; see `Chooser`.

        Tokens are drawn on the device if this is so of all samples of the step.
        """
        searching = [chunk for chunk in step.chunks if chunk.beam_slots and chunk.samples]
        if not searching:
            draws = self._sampler.draws(*step.sampled)
            return DevicePlan(draws, is_whole=draws is not None)
        rules = [self._searcher.rules(each.sequence, each.num_generated) for each in searching]
        is_whole, draws = None not in rules, None
        rows = [chunk for chunk in step.chunks if chunk.samples]
        if len(searching) < len(rows):
            draws = self._draws(rows)
            is_whole = is_whole and draws is not None
        later = _later(searching, step.steps - 1) if is_whole and step.steps > 1 else None
        return DevicePlan(draws, rules, is_whole, self._renormalizes, later)

    def _draws(self, chunks: Sequence[Chunk]) -> Draws | None:
        """Return draws of all rows of logits; nothing uses the draws of searches."""
        samples: list[tuple[GeneratedSequence, int, tuple[int, ...]]] = []
        rows: list[int] = []
        end = 0
        for chunk in chunks:
            if not chunk.beam_slots:
                samples += [(each, chunk.num_generated, chunk.drafted) for each in chunk.samples]
                rows += range(end, end + len(chunk.samples))
            end += chunk.num_logit_rows
        draws = self._sampler.draws(*zip(*samples, strict=True))
        if draws is None:
            return None
        limits, uniform, edits = [_GREEDY] * end, draws.uniform, draws.edits
        for index, limit in zip(rows, draws.limits, strict=True):
            limits[index] = limit
        if uniform is not None:
            uniform = np.zeros(end)
            uniform[rows] = draws.uniform
        if edits is not None:
            edits.rows[:, 0] = np.array(rows)[edits.rows[:, 0]]
        return Draws(limits, uniform, edits)

    def forget(self) -> None:
        self._sampler.forget()

    def given(self, step: Batch) -> Int32Array:
        given: Int32Array = np.full(
            (sum(chunk.beams for chunk in step.chunks), 2), NOT_GIVEN, np.int32
        )
        begin = 0
        for chunk in step.chunks:
            search, own = chunk.sequence.sampler_state, given[begin : begin + chunk.beams]
            if chunk.beams and not chunk.num_generated:
                own[:] = 0, chunk.token_ids[0]
            elif chunk.beams and isinstance(search, BeamSearch):
                parents, tokens = search.step.parents, search.step.token_ids
                # beams that are not alive run, too
                own[:] = 0
                own[: len(parents)] = np.array([parents, tokens]).T
            begin += chunk.beams
        return given

    def outputs(
        self, step: Batch, plan: DevicePlan, chosen: Chosen, logits: Tensor | None
    ) -> list[SampledToken | BeamStep]:
        outputs = self._outputs(step, plan, chosen, logits)
        # drafted rows come first
        for row, guess in enumerate(chosen.guesses):
            outputs[row] = cast(SampledToken, outputs[row])._replace(guess=guess)
        return outputs

    def _outputs(
        self, step: Batch, plan: DevicePlan, chosen: Chosen, logits: Tensor | None
    ) -> list[SampledToken | BeamStep]:
        has_edits = plan.draws is not None and plan.draws.edits is not None
        if plan.is_whole and not plan.searches:
            if has_edits:
                self._sampler.note(*step.sampled[:2], chosen.token_ids)
            no = repeat(None)
            fields = zip(chosen.token_ids, no, no, repeat(False), no)
            return [new_tuple(SampledToken, each) for each in fields]
        outputs: list[SampledToken | BeamStep] = []
        of_host: list[_Row] = []
        of_searches = _results(plan, chosen)
        row = 0
        for chunk in step.chunks:
            length = chunk.num_generated
            for index, sequence in enumerate(chunk.samples, start=row):
                if chunk.beam_slots and (result := next(of_searches)) is not None:
                    search = cast(DeviceSearch, sequence.sampler_state)
                    outputs.append(search.read(length, *result))
                elif not chunk.beam_slots and plan.draws is not None:
                    if has_edits:
                        self._sampler.note([sequence], [length], [chosen.token_ids[index]])
                    outputs.append(SampledToken(chosen.token_ids[index]))
                else:
                    rows = range(index, index + max(1, chunk.beams))
                    of_host.append(_Row(len(outputs), sequence, length, rows, chunk.drafted))
                    outputs.append(BeamStep((), ()))
            row += chunk.num_logit_rows
        for is_search in (False, True):
            part = [each for each in of_host if each.sequence.is_searched is is_search]
            if part:
                assert logits is not None
                for each, output in zip(part, self._choose(logits, part), strict=True):
                    outputs[each.output] = output
        return outputs

    def _choose(self, logits: Tensor, chosen: Sequence[_Row]) -> Sequence[SampledToken | BeamStep]:
        rows = list(chain.from_iterable(each.rows for each in chosen))
        if len(rows) < len(logits):
            logits = logits[torch.tensor(rows, device=logits.device)]
        sequences = [each.sequence for each in chosen]
        if sequences[0].is_searched:
            return self._searcher.advance(logits, sequences, [len(each.rows) for each in chosen])
        lengths, drafted = zip(*[(each.length, each.drafted) for each in chosen], strict=True)
        return self._sampler.sample(logits, sequences, lengths, drafted)


def _later(chunks: Sequence[Chunk], count: int) -> npt.NDArray[np.float64] | None:
    """Return `DevicePlan.later` of this number of steps; None if their rules differ in more."""
    found = []
    for chunk in chunks:
        search = cast(DeviceSearch, chunk.sequence.sampler_state)
        divisors = search.later(chunk.num_generated, count)
        if divisors is None:
            return None
        found.append(divisors)
    return np.array(found).transpose(1, 0, 2)


def _results(
    plan: DevicePlan, chosen: Chosen
) -> Iterator[tuple[list[list[int]], Int32Array, Float32Array] | None]:
    """Yield the part of `SearchResults` of each search; None if the host takes its step."""
    index = beam = 0
    for rules in plan.searches:
        if rules is None:
            yield None
            continue
        assert chosen.searches is not None
        ends, beams, scores = chosen.searches
        own = slice(beam, beam + rules.num_beams)
        yield ends[:, index].tolist(), beams[:, own], scores[:, own]
        index, beam = index + 1, own.stop
