"""The encoder benchmark: varlen beside transformers, zentorch, onnxruntime, OpenVINO and CTranslate2.

docs/benchmarks/encoder.md has the method; `make bench-encoder` runs it with its defaults.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar

import numpy as np
import typer
from tokenizers import Tokenizer

from varlen.errors import CheckpointError
from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.compare.results import Result, fastest, result_of, speed_ratio
from varlen_bench.compare.subject import SystemsSubject, command
from varlen_bench.compare.systems import REFERENCE, BatchUnit, System, by_name
from varlen_bench.compare.turns import measure_in_turns, running, start_system
from varlen_bench.harness.accuracy import Vectors, cosines
from varlen_bench.harness.command import Progress
from varlen_bench.harness.machine import has_native_bf16
from varlen_bench.harness.rows import Cell, provenance
from varlen_bench.harness.worker import Message, WorkerProcess
from varlen_bench.peers.engines import EngineName, Precision
from varlen_bench.peers.exports import cached, exported
from varlen_bench.peers.pooling import POOLING_MODES, PoolingMode
from varlen_bench.peers.random_encoders import RANDOM_ENCODERS, random_encoder
from varlen_bench.workers.encoder import Workload

_MINILM = Path("model_repository/minilm/1")
BASELINE = "transformers-fp32-fifo"
_FIFO_BATCH = 20


def _both(
    engine: EngineName, precision: Precision, unit: BatchUnit = "sequences"
) -> tuple[System, ...]:
    """Return a peer with one instance on all cores, and with one on each."""
    name = f"{engine}-{precision}"
    return (
        System(f"{name}-sorted", engine, precision, "sorted", unit),
        System(f"{name}-per-core", engine, precision, "sorted", unit, per_core=True),
    )


SYSTEMS = by_name(
    System("varlen-fp32", "varlen", "fp32", "engine"),
    System("varlen-bf16", "varlen", "bf16", "engine"),
    System("varlen-int8", "varlen", "int8", "engine"),
    System(BASELINE, "transformers", "fp32", "arrival", size=_FIFO_BATCH),
    *_both("transformers", "fp32"),
    *_both("transformers", "bf16"),
    *_both("zentorch", "fp32"),
    *_both("zentorch", "bf16"),
    *_both("onnxruntime", "fp32"),
    *_both("onnxruntime", "int8"),
    *_both("onnxruntime", "int8-blocks"),
    *_both("openvino", "fp32"),
    *_both("openvino", "bf16"),
    *_both("openvino", "int8"),
    *_both("ctranslate2", "fp32", "tokens"),
    *_both("ctranslate2", "int8", "tokens"),
)

_UNIFORM_SHORTEST, _UNIFORM_LONGEST = 5, 500
_QUERY_SHORTEST, _QUERY_LONGEST = 3, 30
_PAIR_SHORTEST, _PAIR_LONGEST = 60, 250
# Batches of equal sequences, as in the evaluation of TurboTransformers (arXiv:2010.05680).
GRID_BATCHES, _GRID_TOKENS = (1, 20), (10, 100, 200, 500)
# Tokens of a measured pass at least.
_GRID_PASS_TOKENS = 2000

# File with the answer of a system's calibration.
_CALIBRATION = "calibration.json"

# Templates of search queries, and the words that fill them.
_QUERIES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("queries.json").read_text(encoding="utf-8")
)
# Emulated bf16 embeds every eighth sequence by length.
_EMULATED_STEP = 8

_KEY_PREFIXES = {"uniform": "", "short": "short_", "rerank": "rerank_"}
# Beginnings of the precisions that are compared: int8 in blocks is int8.
_CLASSES = ("fp32", "bf16", "int8")
_SPEEDS = ("tokens_per_second", "tokens_per_second_p20", "tokens_per_second_p80")
_FIGURES = (
    *_SPEEDS,
    *"sequences_per_second ratio_to_fifo cosine_mean cosine_min peak_rss_mib".split(),
)


@dataclass(slots=True, kw_only=True)
class EncoderResult(Result):
    """A result with the cosines of its vectors to the vectors of the reference."""

    cosine_mean: float = 0.0
    cosine_min: float = 0.0


@dataclass(kw_only=True)
class EncoderSubject(SystemsSubject[EncoderResult]):
    """Compare varlen's encoder with transformers, zentorch, onnxruntime, OpenVINO and CTranslate2."""

    name: ClassVar = "encoder"
    packages: ClassVar[Sequence[str]] = (
        "torch",
        "transformers",
        "onnxruntime",
        "openvino",
        "ctranslate2",
        "varlen",
    )
    errors: ClassVar = (CheckpointError,)
    systems: ClassVar = SYSTEMS
    columns: ClassVar[Sequence[str]] = (
        *"model workload system batch sequences tokens rounds".split(),
        *_FIGURES,
        *("calibration", "note"),
    )
    shown: ClassVar[Sequence[str]] = ("system", "batch", "sequences", *_FIGURES, "note")
    by: ClassVar = ("workload",)
    worker: ClassVar[str] = "varlen_bench.workers.encoder"
    """Module of the worker processes."""

    model: Annotated[
        Path,
        typer.Option(
            help="Hugging Face folder of an embedding model, or one with random weights: "
            + ", ".join(RANDOM_ENCODERS)
        ),
    ] = _MINILM
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of 5-500 tokens.")] = 96
    queries: Annotated[int, typer.Option(min=1, help="Short queries.")] = 512
    pairs: Annotated[
        int, typer.Option(min=0, help="Sequences of 60-250 tokens, as a request to a reranker has.")
    ] = 100
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Only batches of 1 and 20 equal sequences, of 10-500 tokens."),
    ] = False
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse",
            help="Keep batch sizes and reference vectors; take those of an earlier run if machine, "
            "files, versions and workloads are the same.",
        ),
    ] = False

    pooling: PoolingMode = field(init=False)
    workloads: list[Workload] = field(init=False)

    @property
    def bench_name(self) -> str:
        """Name of the BENCH line."""
        return "encoder_grid" if self.grid else self.name

    def prepare(self) -> None:
        """Choose systems, and make the workloads."""
        super().prepare()
        if self.quick:
            self.rounds = min(self.rounds, 2)
            self.sequences, self.queries = min(self.sequences, 24), min(self.queries, 96)
            self.pairs = min(self.pairs, 12)
        if str(self.model) in RANDOM_ENCODERS:
            self.model = random_encoder(str(self.model), tokenizer=_MINILM)
        self.pooling = _pooling(self.model)
        if self.grid:
            self.workloads = grid_workloads(self.model, self.seed)
            return
        self.workloads = [
            uniform_workload(self.model, self.sequences, self.seed),
            short_workload(self.model, self.queries, self.seed),
            *([rerank_workload(self.model, self.pairs, self.seed)] if self.pairs else []),
        ]
        if self.quick:
            self.workloads = [each.with_fewer_sizes() for each in self.workloads]

    def measure(self, progress: Progress) -> Iterator[list[EncoderResult]]:
        """Yield a result for every system and workload.

        A system that fails leaves results with the reason; the others go on.
        """
        with TemporaryDirectory(prefix="varlen-bench-") as folder:
            scratch = Path(folder)
            start = partial(self._start, scratch=scratch)

            def make_vectors(folder: Path) -> None:
                progress("reference vectors: transformers fp32, one sequence at a time")
                with start(REFERENCE) as alone:
                    _ask(alone, "prepare", self.workloads, sizes={})
                shutil.copytree(scratch / REFERENCE.name, folder)

            vectors = self._once(REFERENCE, make_vectors, scratch)
            expected = {each.name: _vectors(vectors, each) for each in self.workloads}

            def prepare(process: WorkerProcess, own: Sequence[EncoderResult]) -> None:
                self._prepare_system(process, own, expected, scratch)

            results = [_empty(system, each) for system in self.chosen for each in self.workloads]
            with running(results, start, prepare, progress) as processes:

                def measure(result: EncoderResult) -> dict[str, float]:
                    process = processes[result.system.name]
                    found = process.ask(do="measure", workload=result.workload)
                    speed = result.work / found["seconds"]
                    return {"tokens_per_second": speed, "peak_rss_mib": found["peak_rss_mib"]}

                turns = self._in_turn(results)
                measure_in_turns(turns, measure, rounds=self.rounds, report=progress)
            yield results

    def _in_turn(self, results: Sequence[EncoderResult]) -> Sequence[EncoderResult]:
        """Return results in the order of a round: each workload with all systems."""
        names = [workload.name for workload in self.workloads]
        return sorted(results, key=lambda result: names.index(result.workload))

    def _derived(self, result: EncoderResult, results: Sequence[EncoderResult]) -> dict[str, Cell]:
        model = self.model.resolve()
        # its folder may be a version of it
        name = model.parent.name if model.name.isdigit() else model.name
        cells: dict[str, Cell] = {
            "model": name,
            "sequences": result.requests,
            "tokens": result.work,
        }
        if not result.rounds:
            return {**cells, "cosine_mean": None, "cosine_min": None}
        figures = result.figures()
        here = (other for other in results if other.workload == result.workload)
        return {
            **cells,
            **{name: round(float(figures[name] or 0)) for name in _SPEEDS},
            "sequences_per_second": _speed(result) * result.requests / result.work,
            "ratio_to_fifo": speed_ratio(result, result_of(here, BASELINE)),
            "peak_rss_mib": round(max(each["peak_rss_mib"] for each in result.rounds)),
        }

    def figures(self, results: Sequence[EncoderResult]) -> dict[str, Cell]:
        """Return the keys of the BENCH line; None where a system did not run."""
        return _grid_figures(results) if self.grid else _figures(results)

    def _start(self, system: System, scratch: Path) -> WorkerProcess:
        checkpoint = exported(self.model, system.engine, system.precision, self.pooling)
        more = {"pooling": self.pooling}
        return start_system(self.worker, system, checkpoint, scratch, threads=self.cores, **more)

    def _once(self, system: System, make: Callable[[Path], None], scratch: Path) -> Path:
        """Return the folder that `make` writes about a system: now, or in an earlier run."""
        if not self.reuse:
            target = scratch / f"{system.name}-found"
            make(target)
            return target
        run = provenance(
            threads=self.cores, packages=self.packages, command="", root=self.model, revision="any"
        )
        files = [file.stat() for file in sorted(self.model.iterdir())]
        made = [(file.st_size, file.st_mtime_ns) for file in files]
        parts = (run.cpu, run.threads, run.versions, str(self.model.resolve()), made)
        key = hashlib.sha256(f"{parts} {self.workloads} {system}".encode()).hexdigest()[:16]
        return cached(f"{key}-{system.name}", make)

    def _prepare_system(
        self,
        process: WorkerProcess,
        results: Sequence[EncoderResult],
        expected: Mapping[str, Vectors],
        scratch: Path,
    ) -> None:
        """Calibrate a system, warm it up and compare its vectors."""
        system = results[0].system
        parts = [_part(system, workload) for workload in self.workloads]
        workloads = [part for part, _ in parts]

        def calibrate(folder: Path) -> None:
            answer = _ask(process, "calibrate", workloads)
            folder.mkdir()
            (folder / _CALIBRATION).write_text(json.dumps(answer), encoding="utf-8")

        folder = self._once(system, calibrate, scratch)
        answer: Message = json.loads((folder / _CALIBRATION).read_text(encoding="utf-8"))
        _ask(process, "prepare", workloads, sizes=answer["sizes"])
        for result, (part, kept) in zip(results, parts, strict=True):
            result.batch = answer["batching"][part.name]
            speeds = answer["calibration"][part.name].items()
            result.calibration = "; ".join(f"{size}: {speed:.0f}" for size, speed in speeds)
            found = cosines(_vectors(scratch / system.name, part), expected[part.name][kept])
            result.cosine_mean, result.cosine_min = float(found.mean()), float(found.min())


def _figures(results: Sequence[EncoderResult]) -> dict[str, Cell]:
    figures: dict[str, Cell] = {}
    for workload, prefix in _KEY_PREFIXES.items():
        here = [result for result in results if result.workload == workload]
        ours, baseline = result_of(here, "varlen-fp32"), result_of(here, BASELINE)
        figures[f"{prefix}fp32_vs_fifo"] = speed_ratio(ours, baseline)
        for precision in _CLASSES:
            figures |= _against_peers(here, precision, f"{prefix}{precision}_")
    return figures


def _against_peers(
    results: Sequence[EncoderResult], precision: str, prefix: str
) -> dict[str, Cell]:
    """Return the keys of one precision: ours beside the fastest peer, whatever its quality."""
    ran = [each for each in results if each.system.precision.startswith(precision) and each.rounds]
    ours = fastest(result for result in ran if result.system.is_ours)
    peer = fastest(result for result in ran if not result.system.is_ours)
    return {
        f"{prefix}vs_peer": speed_ratio(ours, peer),
        f"{prefix}peer": peer.system.name if peer else None,
        f"{prefix}cosine": round(ours.cosine_mean, 6) if ours else None,
        f"{prefix}peer_cosine": round(peer.cosine_mean, 6) if peer else None,
    }


def _grid_figures(results: Sequence[EncoderResult]) -> dict[str, Cell]:
    """Return the keys of batches of equal sequences: geometric means over their lengths.

    Ours in fp32 over transformers, and over the fastest peer in fp32 at each length.
    """
    engines = {"vs_transformers": "transformers", "vs_best_peer": ""}
    return {
        f"batch_{size}_{key}": _grid_ratio(results, size, engine)
        for size in GRID_BATCHES
        for key, engine in engines.items()
    }


def _grid_ratio(results: Sequence[EncoderResult], size: int, engine: str) -> float | None:
    """Return ours over the fastest peer, or the fastest of one engine, at a size."""
    fp32 = [result for result in results if result.system.precision == "fp32"]
    ratios = []
    for workload in dict.fromkeys(result.workload for result in fp32):
        if not workload.startswith(f"{size}x"):
            continue
        here = [result for result in fp32 if result.workload == workload]
        ours = fastest(result for result in here if result.system.is_ours)
        peers = (result for result in here if not result.system.is_ours)
        peer = fastest(each for each in peers if engine in {"", each.system.engine})
        ratios.append(speed_ratio(ours, peer))
    found = [ratio for ratio in ratios if ratio is not None]
    return round(statistics.geometric_mean(found), 4) if found else None


def _speed(result: EncoderResult) -> float:
    return statistics.median(result.speeds)


def _vectors(folder: Path, workload: Workload) -> Vectors:
    vectors: Vectors = np.load(folder / f"{workload.name}.npy")
    return vectors


def _ask(process: WorkerProcess, order: str, workloads: Iterable[Workload], **more: Any) -> Message:
    return process.ask(do=order, workloads=[asdict(workload) for workload in workloads], **more)


def _part(system: System, workload: Workload) -> tuple[Workload, list[int]]:
    """Return the part of a workload that a system embeds, and its indices."""
    is_emulated = system.precision == "bf16" and not has_native_bf16()
    return workload.thinned(_EMULATED_STEP if is_emulated else 1)


def _empty(system: System, workload: Workload) -> EncoderResult:
    part, kept = _part(system, workload)
    result = EncoderResult(
        system=system, workload=part.name, requests=len(kept), work=part.num_tokens
    )
    if len(kept) < len(workload.sequences):
        counts = f"{len(kept)} of {len(workload.sequences)} sequences"
        result.note = f"no bf16 instructions on this CPU: {counts}"
    return result


def uniform_workload(model: Path, count: int, seed: int = 0) -> Workload:
    """Return sequences of random words, 5-500 tokens or the model's limit."""
    draw = random.Random(seed)
    make = _maker(model, draw)
    longest = min(_UNIFORM_LONGEST, Checkpoint.open(model).position_limit)
    sequences = [make(draw.randint(_UNIFORM_SHORTEST, longest)) for _ in range(count)]
    return Workload("uniform", sequences, (1, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192))


def grid_workloads(model: Path, seed: int = 0) -> list[Workload]:
    """Return batches of equal sequences, named by sequences and tokens, such as `20x100`."""
    make = _maker(model, random.Random(seed))
    limit = Checkpoint.open(model).position_limit
    workloads = []
    for size in GRID_BATCHES:
        for length in dict.fromkeys(min(tokens, limit) for tokens in _GRID_TOKENS):
            sequences = [make(length) for _ in range(size)]
            tokens = size * length
            times = -(-_GRID_PASS_TOKENS // tokens)
            workloads.append(Workload(f"{size}x{length}", sequences, (size,), (tokens,), times))
    return workloads


def short_workload(model: Path, count: int, seed: int = 0) -> Workload:
    """Return tokenized search queries of 3-30 tokens, special tokens included."""
    tokenizer = _tokenizer(model)
    longest = min(_QUERY_LONGEST, Checkpoint.open(model).position_limit)
    draw = random.Random(seed)
    sequences: list[list[int]] = []
    while len(sequences) < count:
        ids = tokenizer.encode(_query(draw)).ids
        if _QUERY_SHORTEST <= len(ids) <= longest:
            sequences.append(ids)
    return Workload("short", sequences, (1, 4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096))


def rerank_workload(model: Path, count: int, seed: int = 0) -> Workload:
    """Return sequences of random words, 60-250 tokens or the model's limit."""
    draw = random.Random(seed)
    make = _maker(model, draw)
    limit = Checkpoint.open(model).position_limit
    shortest, longest = min(_PAIR_SHORTEST, limit), min(_PAIR_LONGEST, limit)
    sequences = [make(draw.randint(shortest, longest)) for _ in range(count)]
    return Workload("rerank", sequences, (1, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192))


def _maker(model: Path, draw: random.Random) -> Callable[[int], list[int]]:
    """Return a function that makes a sequence of random words, of a length in tokens."""
    tokenizer = _tokenizer(model)
    before, after = _special_tokens(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    words = sorted(i for t, i in vocabulary.items() if i not in added and t[0] not in "[<")

    def make(length: int) -> list[int]:
        inner = length - len(before) - len(after)
        return [*before, *draw.choices(words, k=inner), *after]

    return make


def _query(draw: random.Random) -> str:
    subject, other = draw.sample(_QUERIES["subjects"], 2)
    place, place2 = draw.sample(_QUERIES["places"], 2)
    return draw.choice(_QUERIES["templates"]).format(
        subject=subject,
        other=other,
        place=place,
        place2=place2,
        verb=draw.choice(_QUERIES["verbs"]),
        quality=draw.choice(_QUERIES["qualities"]),
        tail=draw.choice(_QUERIES["tails"]),
    )


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer puts before and after every text."""
    encoding = tokenizer.encode("a")
    words = [at for at, special in enumerate(encoding.special_tokens_mask) if not special]
    if not words:
        raise ValueError('the tokenizer gives no token for the text "a"')
    return encoding.ids[: words[0]], encoding.ids[words[-1] + 1 :]


def _tokenizer(model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _pooling(model: Path) -> PoolingMode:
    """Return how a model pools; its peers do the same."""
    checkpoint = Checkpoint.open(model)
    mode, *others = checkpoint.pooling
    if others or checkpoint.dense or mode not in POOLING_MODES:
        raise ValueError(
            f"{model} pools by {' and '.join(checkpoint.pooling)}, with {len(checkpoint.dense)} dense layers; "
            f"the peers of this benchmark pool by one of {', '.join(POOLING_MODES)}, with none"
        )
    return mode


app = command(EncoderSubject)

if __name__ == "__main__":
    app()
