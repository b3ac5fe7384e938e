"""The benchmark of beam search: translations of varlen beside transformers and CTranslate2.

docs/benchmarks/beam.md has the method; `make bench-beam` runs it with its defaults.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar

import typer

from varlen_bench.compare.generating import Answers, Comparison, GeneratingSubject, ask
from varlen_bench.compare.passes import Requests
from varlen_bench.compare.results import Result, best_peer, result_of, speed_ratio
from varlen_bench.compare.subject import command
from varlen_bench.compare.systems import System
from varlen_bench.harness.command import Progress
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import ratio, rounded
from varlen_bench.harness.worker import Message, WorkerProcess, ask_once
from varlen_bench.peers.checkpoints import TRANSFORMER_BASE, config_field, save_random_translator
from varlen_bench.workers.beam import OURS, SYSTEMS, TRANSFORMERS
from varlen_bench.workloads import Mix, token_ids
from varlen_tools.train_demo.dates import FORMS, held_out_examples

BASE, DATES = TRANSFORMER_BASE.name, "tiny_dates"
_QUICK_REQUESTS = 8
# Rates of arrivals at which varlen is measured, as multiples of the rate of all systems.
_MULTIPLES = (2.0, 3.0, 4.0, 6.0)
# The isolated step, and its shape in the BENCH line.
_STEP, _STEP_SHAPE = System("beam_step", "varlen", "fp32", "engine"), "8x4x32000"
# Words of a sentence of WMT's newstest: the median, and the length that a tenth exceeds.
_MEDIAN_WORDS, _LONG_WORDS = 21, 38
_TOKENS_PER_WORD = 1.3
# Number of quantiles of the log-normal distribution in the mix of lengths.
_QUANTILES = 1000
# A date in ISO form has 11 tokens with the end.
_DATE_TOKENS = 16
_FIGURES = (
    "sentences_per_second sentences_per_second_p20 sentences_per_second_p80 latency_p50_ms latency_p99_ms tokens "
    "machine_gflops step_us blocks_us torch_us reorder_us survivors step_vs_torch"
).split()


@dataclass(kw_only=True)
class BeamSubject(GeneratingSubject):
    """Compare varlen's beam search with transformers and CTranslate2 on this CPU."""

    name: ClassVar = "beam"
    packages: ClassVar = ("torch", "transformers", "ctranslate2", "varlen")
    systems: ClassVar = SYSTEMS
    worker: ClassVar = "varlen_bench.workers.beam"
    unit: ClassVar = "sentences"
    speed: ClassVar = "sentences_per_second"
    calibration_format: ClassVar = ".3g"
    # with two, a single sentence waits long for other work of the machine
    reference_threads: ClassVar = 1
    prefixes: ClassVar = {BASE: "", DATES: "dates_"}
    columns: ClassVar = (
        *"model workload arrivals rate system batch requests rounds equal_hypotheses".split(),
        *_FIGURES,
        *("calibration", "note"),
    )
    shown: ClassVar = (
        *"workload system batch rate equal_hypotheses requests".split(),
        *_FIGURES,
        "note",
    )

    model: Annotated[
        str, typer.Option(help=f"{BASE} and {DATES}, comma-separated; by default both.")
    ] = ""
    load: Annotated[
        float, typer.Option(min=0.01, help="Poisson arrivals, as a share of transformers' speed.")
    ] = 0.5

    def prepare(self) -> None:
        """Choose systems and models."""
        if self.quick:
            self.requests, self.rounds = min(self.requests, _QUICK_REQUESTS), 1
        self._choose(self.model or (DATES if self.quick else ""))

    def _load_model(self, name: str, scratch: Path) -> tuple[Path, Requests]:
        checkpoint = self.repository / DATES / "1"
        if name == BASE:
            checkpoint = scratch / name
            save_random_translator(TRANSFORMER_BASE, checkpoint)
        # without it, the tokenizer fails with a message that names no file
        vocabulary = config_field(checkpoint, "vocab_size")
        if name == DATES:
            return checkpoint, date_requests(checkpoint, self.requests, self.seed)
        positions = config_field(checkpoint, "max_position_embeddings")
        return checkpoint, news_requests(self.requests, vocabulary, positions, self.seed)

    def _prepare_system(
        self, process: WorkerProcess, result: Result, requests: Requests, expected: Answers
    ) -> None:
        del result, expected
        ask(process, "warm up", requests)

    def _figures_of(self, answer: Message, expected: Answers) -> dict[str, float]:
        pairs = zip(answer["answers"], expected, strict=True)
        equal = sum(answer == wanted for answer, wanted in pairs)
        return {**answer["figures"], "equal_hypotheses": equal}

    def _base(self, results: Sequence[Result]) -> Result | None:
        ran = (result for result in results if result.rounds)
        return result_of(results, TRANSFORMERS) or next(ran, None)

    def _further(self, comparison: Comparison, poisson: Sequence[Result]) -> list[Result]:
        ours, theirs = result_of(poisson, OURS), result_of(poisson, TRANSFORMERS)
        if ours is None or theirs is None or ours.rate is None:
            return []
        limit, found = theirs.median("latency_p99_ms"), list[Result]()
        for multiple in _MULTIPLES:
            found += comparison.measure_arriving([ours], multiple * ours.rate)
            latency = found[-1].median("latency_p99_ms")
            if latency is None or limit is None or latency > limit:
                break
        return found

    def measure(self, progress: Progress) -> Iterator[Sequence[Result]]:
        """Yield the results of each model, and of the isolated step."""
        yield from super().measure(progress)
        if SYSTEMS[OURS] in self.chosen:
            progress("the step alone")
            yield self.measure_steps()

    def measure_steps(self) -> list[Result]:
        """Return the result of each shape of the isolated step."""
        with TemporaryDirectory(prefix="varlen-bench-") as folder:
            module, log = "varlen_bench.workers.beam_step", Path(folder, "step.log")
            found = ask_once(module, {"threads": self.cores}, log, threads=self.cores)
        return [
            Result(system=_STEP, workload=shape, model="step alone", rounds=[figures])
            for shape, figures in found.items()
        ]

    def _derived(self, result: Result, results: Sequence[Result]) -> dict[str, Cell]:  # noqa: ARG002
        return {"equal_hypotheses": _equal(result), "arrivals": result.arrivals or None}

    def figures(self, results: Sequence[Result]) -> dict[str, Cell]:
        """Return the keys of the BENCH line; the date model's begin with `dates_`."""
        step = next((each for each in results if each.workload == _STEP_SHAPE), None)
        return {
            **super().figures(results),
            "step_vs_torch": rounded(step.median("step_vs_torch") if step else None),
            "step_us": rounded(step.median("step_us") if step else None, 1),
        }

    def _model_figures(self, results: Sequence[Result]) -> dict[str, Cell]:
        at_once = [result for result in results if result.arrivals == "at once"]
        ours, peer = result_of(at_once, OURS), best_peer(at_once)
        return {
            "vs_transformers": speed_ratio(ours, result_of(at_once, TRANSFORMERS)),
            "vs_transformers_poisson": rounded(equal_latency_ratio(results)),
            "vs_best_peer": speed_ratio(ours, peer),
            "best_peer": peer.system.name if peer else None,
            "equal_hypotheses": rounded(ratio(_equal(ours), ours.requests) if ours else None),
        }


def equal_latency_ratio(results: Sequence[Result]) -> float | None:
    """Return the rate of varlen over the rate of transformers, at equal p99 latency.

    Between two measured rates the latency counts as linear. The rate is at most what varlen serves at once, since a
    higher one lasts only as long as the workload. None if one of both did not run.
    """
    poisson = [result for result in results if result.arrivals == "poisson" and result.rounds]
    theirs = result_of(poisson, TRANSFORMERS)
    ours = sorted(
        (result.rate or 0.0, result.median("latency_p99_ms") or 0.0)
        for result in poisson
        if result.system.name == OURS
    )
    at_once = result_of((each for each in results if each.arrivals == "at once"), OURS)
    if theirs is None or not theirs.rate or not ours or at_once is None:
        return None
    limit = theirs.median("latency_p99_ms") or 0.0
    best = 0.0
    before = (0.0, 0.0)
    for rate, latency in ours:
        if latency > limit:
            share = max(0.0, limit - before[1]) / (latency - before[1])
            best = before[0] + share * (rate - before[0])
            break
        best, before = rate, (rate, latency)
    return min(best, statistics.median(at_once.speeds)) / theirs.rate


def _equal(result: Result) -> int | None:
    """Return the answers that equal the reference, in the worst round."""
    return min(
        (int(each["equal_hypotheses"]) for each in result.rounds if "equal_hypotheses" in each),
        default=None,
    )


def news_requests(count: int, vocabulary: int, positions: int, seed: int) -> Requests:
    """Return random sentences with lengths as in news, all at once.

    An answer has as many tokens as its source without the end, so batches that are sorted by source length waste
    nothing on answers that end early.
    """
    deviation = math.log(_LONG_WORDS / _MEDIAN_WORDS) / NormalDist().inv_cdf(0.9)
    words = NormalDist(math.log(_MEDIAN_WORDS), deviation)
    lengths = [
        max(1, min(positions - 1, round(_TOKENS_PER_WORD * math.exp(words.inv_cdf(share)))))
        for share in ((2 * i + 1) / (2 * _QUANTILES) for i in range(_QUANTILES))
    ]
    limits = Mix("news", "", tuple(lengths)).take(count, seed)
    # tokens 0 and 1 end and pad
    sources = [[token + 1 for token in ids] for ids in token_ids(limits, vocabulary - 1, seed)]
    label = f"words p50 {_MEDIAN_WORDS}, p90 {_LONG_WORDS}; {_TOKENS_PER_WORD} tokens each"
    return Requests.at_once(label, [[*ids, 0] for ids in sources], limits)


def date_requests(checkpoint: Path, count: int, seed: int) -> Requests:
    """Return dates that training never shows, in random written forms, all at once."""
    from tokenizers import Tokenizer

    numbers = random.Random(seed)
    examples = held_out_examples(-(-count // len(FORMS)), numbers)
    texts = [example.source for example in numbers.sample(examples, count)]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    sources = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    return Requests.at_once("dates in written forms", sources, [_DATE_TOKENS] * count)


app = command(BeamSubject)

if __name__ == "__main__":
    app()
