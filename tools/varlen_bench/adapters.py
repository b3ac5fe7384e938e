"""The benchmark of adapters: many in one batch, beside the model alone and peft.

docs/benchmarks/adapters.md has the method; `make bench-adapters` runs it with its defaults.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar

import numpy as np
import typer

from varlen_bench.compare.results import Result, fastest, result_of, speed_ratio
from varlen_bench.compare.subject import SystemsSubject, command
from varlen_bench.compare.turns import measure_in_turns, running, start_system
from varlen_bench.harness.command import Progress, refused, select
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.peers.checkpoints import (
    MINILM,
    TRANSFORMER_BASE,
    EncoderShape,
    LlamaShape,
    save_random_checkpoint,
    save_random_decoder,
    save_random_translator,
    save_word_tokenizer,
)
from varlen_bench.peers.engines import Precision
from varlen_bench.workers.adapters import BASE, MIXED, SYSTEMS, UNUSED, Workload, save_adapters
from varlen_bench.workloads import Mix, token_ids

LLAMA = LlamaShape("llama-6x768", 768, 6, 12, 4, features=2048, positions=512, vocabulary=32_000)
# Lengths of texts to embed, of prompts, and of texts to translate, and tokens of an answer.
_TEXTS, _PROMPTS, _SOURCES, _ANSWER = (5, 250), (8, 64), (8, 48), 24
_POSITIONS = 512
_FIRST_TOKEN = 10
# What peft changes by default in models whose layers it knows, and all layers.
_TARGETS: Mapping[str, str | list[str]] = {"all": "all-linear", "q,v": ["q_proj", "v_proj"]}
_BERT_TARGETS: Mapping[str, str | list[str]] = {**_TARGETS, "q,v": ["query", "value"]}
_FIGURES = "tokens_per_second tokens_per_second_p20 tokens_per_second_p80".split()


@dataclass(frozen=True, slots=True)
class _Model:
    """A model with random weights.

    Attributes:
        kind: "embed", "generate" or "translate".
        save: saves it into a folder.
        lengths: shortest and longest request, in tokens.
    """

    kind: str
    save: Callable[[Path], None]
    vocabulary: int
    lengths: tuple[int, int]
    targets: Mapping[str, str | list[str]] = field(default_factory=lambda: _TARGETS)


def _save_encoder(folder: Path, shape: EncoderShape = MINILM) -> None:
    """Save a BertModel with random weights, and a tokenizer whose words are numbers."""
    save_random_checkpoint(shape, folder, _POSITIONS)
    save_word_tokenizer(["</s>", "<pad>", *map(str, range(2, shape.vocabulary))], folder)


_MODELS = {
    MINILM.name: _Model(
        "embed",
        _save_encoder,
        MINILM.vocabulary,
        _TEXTS,
        _BERT_TARGETS,
    ),
    LLAMA.name: _Model("generate", partial(save_random_decoder, LLAMA), LLAMA.vocabulary, _PROMPTS),
    TRANSFORMER_BASE.name: _Model(
        "translate",
        partial(save_random_translator, TRANSFORMER_BASE),
        TRANSFORMER_BASE.vocabulary,
        _SOURCES,
    ),
}


@dataclass(slots=True, kw_only=True)
class AdapterResult(Result):
    """A result with the layers that adapters change.

    Attributes:
        agreement: likeness of its answers to the answers of peft, see `_agreement`.
    """

    targets: str = ""
    agreement: float | None = None


@dataclass(kw_only=True)
class AdaptersSubject(SystemsSubject[AdapterResult]):
    """Compare a batch of many adapters with the model alone and peft."""

    name: ClassVar = "adapters"
    packages: ClassVar = ("torch", "transformers", "peft", "varlen")
    systems: ClassVar = SYSTEMS
    columns: ClassVar = (
        *"model targets workload precision system requests tokens rounds".split(),
        *_FIGURES,
        *"ratio_to_base ratio_to_peft agreement note".split(),
    )
    shown: ClassVar = ("system", *_FIGURES, "ratio_to_base", "ratio_to_peft", "agreement", "note")
    by: ClassVar = ("model", "targets", "workload")

    models: Annotated[
        str, typer.Option(help=f"{', '.join(_MODELS)}; comma-separated, by default all.")
    ] = ""
    adapters: Annotated[int, typer.Option(min=1, help="Number of adapters.")] = 32
    ranks: Annotated[str, typer.Option(help="Ranks of the adapters, in turn.")] = "8,16"
    requests: Annotated[int, typer.Option(min=1, help="Requests of a pass.")] = 48
    precision: Annotated[Precision, typer.Option(help="fp32 or bf16, of every system.")] = "fp32"

    def prepare(self) -> None:
        """Choose systems and models."""
        super().prepare()
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision}; allowed: fp32, bf16")
        self.chosen = [replace(each, precision=self.precision) for each in self.chosen]
        names = select(self.models, _MODELS)
        if self.quick:
            self.rounds, self.requests, self.adapters = 1, min(self.requests, 6), 3
            names = names if self.models else [MINILM.name]
        self._names = names
        self._ranks = [int(rank) for rank in self.ranks.split(",")]

    def measure(self, progress: Progress) -> Iterator[list[AdapterResult]]:
        """Yield the results of each model."""
        for name in self._names:
            with TemporaryDirectory(prefix="varlen-bench-") as folder:
                with refused():
                    progress(f"{name}: adapters")
                    workloads = self._workloads(name, Path(folder))
                yield self._measured(name, workloads, Path(folder), progress)

    def _workloads(self, name: str, scratch: Path) -> list[Workload]:
        """Return the workload of each set of layers that adapters change."""
        model, checkpoint = _MODELS[name], scratch / "checkpoint"
        model.save(checkpoint)
        lengths = Mix("", "", tuple(range(model.lengths[0], model.lengths[1] + 1)))
        taken = lengths.take(self.requests, self.seed)
        rows = token_ids(taken, model.vocabulary - _FIRST_TOKEN, self.seed)
        prompts = [[token + _FIRST_TOKEN for token in ids] for ids in rows]
        numbers = random.Random(self.seed)
        chosen = [numbers.randrange(self.adapters) for _ in prompts]
        found = []
        for targets, modules in model.targets.items():
            folders = save_adapters(
                model.kind,
                checkpoint,
                scratch / targets.replace(",", ""),
                modules,
                self.adapters,
                self._ranks,
            )
            names = [folders[number].name for number in chosen]
            folder_names = [str(each) for each in folders]
            found.append(
                Workload(
                    targets, model.kind, str(checkpoint), folder_names, prompts, names, _ANSWER
                )
            )
        return found

    def _measured(
        self, name: str, workloads: Sequence[Workload], scratch: Path, progress: Progress
    ) -> list[AdapterResult]:
        """Return the results of all systems on the workloads of a model."""
        results = [
            AdapterResult(
                system=system,
                model=name,
                targets=workload.name,
                workload=workload.label,
                requests=len(workload.prompts),
                work=workload.num_tokens,
            )
            for workload in workloads
            for system in self.chosen
        ]
        answers: dict[tuple[str, str], Any] = {}

        def prepare(process: WorkerProcess, own: list[AdapterResult]) -> None:
            for result in own:
                found = process.ask(do="check", workload=result.targets)
                answers[result.targets, result.system.name] = found["answers"]

        def measure(result: AdapterResult) -> dict[str, float]:
            seconds = processes[result.system.name].ask(do="time", workload=result.targets)
            return {"tokens_per_second": result.work / seconds["seconds"]}

        start = partial(
            start_system,
            "varlen_bench.workers.adapters",
            checkpoint=scratch / "checkpoint",
            scratch=scratch,
            threads=self.cores,
            workloads=[asdict(each) for each in workloads],
        )
        with running(results, start, prepare, progress) as processes:
            measure_in_turns(results, measure, rounds=self.rounds, report=progress)
        for result in results:
            found = answers.get((result.targets, result.system.name))
            expected = answers.get((result.targets, "peft-mixed"))
            if found is not None and expected is not None and "base" not in result.system.name:
                result.agreement = _agreement(found, expected)
        return results

    def _derived(self, result: AdapterResult, results: Sequence[AdapterResult]) -> dict[str, Cell]:
        here = [each for each in results if _place(each) == _place(result)]
        base = result_of(here, BASE if result.system.is_ours else "transformers-base")
        return {
            "tokens": result.work,
            "precision": self.precision,
            "ratio_to_base": speed_ratio(result, base),
            "ratio_to_peft": speed_ratio(result, _best_peft(here)),
        }

    def figures(self, results: Sequence[AdapterResult]) -> dict[str, Cell]:
        """Return the keys of the BENCH line, of each model and set of layers."""
        figures: dict[str, Cell] = {}
        for model, targets in dict.fromkeys(map(_place, results)):
            here = [each for each in results if _place(each) == (model, targets)]
            mixed, base = result_of(here, MIXED), result_of(here, BASE)
            prefix = f"{_MODELS[model].kind}_{targets.replace(',', '')}"
            figures[f"{prefix}_vs_base"] = speed_ratio(mixed, base)
            figures[f"{prefix}_unused_vs_base"] = speed_ratio(result_of(here, UNUSED), base)
            figures[f"{prefix}_vs_peft"] = speed_ratio(mixed, _best_peft(here))
            figures[f"{prefix}_agreement"] = mixed.agreement if mixed else None
        return figures


def _place(result: AdapterResult) -> tuple[str, str]:
    return result.model, result.targets


def _best_peft(results: Sequence[AdapterResult]) -> AdapterResult | None:
    return fastest(each for each in results if each.system.name.startswith("peft"))


def _agreement(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Return the least cosine of vectors, or the share of tokens that are equal."""
    ours, theirs = np.array(found), np.array(expected)
    if ours.dtype.kind == "i":
        return float((ours == theirs).mean())
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(1) / lengths).min())


app = command(AdaptersSubject)

if __name__ == "__main__":
    app()
