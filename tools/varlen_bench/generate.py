"""The generation benchmark: varlen beside six other engines.

docs/benchmarks/generate.md has the method; `make bench-generate` runs it with its defaults.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias

import typer
from tokenizers import Tokenizer

from varlen_bench.compare.generating import Answers, Comparison, GeneratingSubject, ask
from varlen_bench.compare.passes import Requests
from varlen_bench.compare.results import Result, best_peer, fastest, result_of, speed_ratio
from varlen_bench.compare.subject import command
from varlen_bench.compare.turns import noted_failure
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import ratio, rounded
from varlen_bench.harness.worker import WorkerProcess, ask_once
from varlen_bench.peers.checkpoints import (
    GPT2_SMALL,
    LLAMA_SMALL,
    config_field,
    save_random_decoder,
)
from varlen_bench.peers.trained import TARGET, library_files, trained_pair
from varlen_bench.workers.generate import (
    DRAFTING,
    MODEL_DRAFTING,
    OURS,
    REQUEST_LEVEL,
    SYSTEMS,
)
from varlen_bench.workloads import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Mix,
    fitting_divisor,
    read_generation_trace,
    token_ids,
)
from varlen_tools.train_demo.__main__ import python_documents

TINY_GPT2, LLAMA_TRAINED = "tiny_gpt2", "llama-trained"
_RANDOM = {shape.name: shape for shape in (GPT2_SMALL, LLAMA_SMALL)}
_PREFIXES = {
    GPT2_SMALL.name: "",
    TINY_GPT2: "tiny_gpt2_",
    LLAMA_SMALL.name: "llama_small_",
    LLAMA_TRAINED: "llama_trained_",
}
_DEFAULT = f"{GPT2_SMALL.name},{TINY_GPT2}"
_CHECKED_REQUESTS, _CHECKED_TOKENS = 6, 12
# Times that a part of a text stands in a repeated prompt, and tokens of a text that is random.
_TIMES, _TEXT_TOKENS = 3, 10_000
_FIGURES = (
    "tokens_per_second tokens_per_second_p20 tokens_per_second_p80 ttft_p50_ms ttft_p99_ms per_token_p50_ms "
    "per_token_p99_ms gap_p50_ms gap_p99_ms machine_gflops step_ms limit_ms drafted_tokens accepted_tokens"
).split()
# Where the models are trained that have no other folder.
PAIR = Path(".venv/llama-trained")
Pair: TypeAlias = Annotated[
    Path, typer.Option(help=f"Folder of {LLAMA_TRAINED} and its draft model, trained if missing.")
]


class Prompts(str, Enum):
    """Contents of prompts."""

    random = "random"
    plain = "plain"
    repeated = "repeated"


@dataclass(kw_only=True)
class GenerateSubject(GeneratingSubject):
    """Compare varlen's generation with six other engines on this CPU."""

    name: ClassVar = "generate"
    packages: ClassVar = ("torch", "transformers", "ctranslate2", "varlen")
    systems: ClassVar = SYSTEMS
    worker: ClassVar = "varlen_bench.workers.generate"
    unit: ClassVar = "tokens"
    calibration_format: ClassVar = ".0f"
    prefixes: ClassVar = _PREFIXES
    columns: ClassVar = (
        *"model workload arrivals rate system batch requests tokens rounds equal_tokens".split(),
        *_FIGURES,
        *("calibration", "note"),
    )
    shown: ClassVar = ("system", "batch", "equal_tokens", *_FIGURES, "note")

    models: Annotated[
        str, typer.Option(help=f"{', '.join(_PREFIXES)}; comma-separated, by default {_DEFAULT}.")
    ] = ""
    load: Annotated[
        float, typer.Option(min=0.01, help="Poisson arrivals, as a share of the best peer's speed.")
    ] = 0.7
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV of an Azure LLM trace: TIMESTAMP, ContextTokens, GeneratedTokens."),
    ] = None

    prompts: Annotated[
        Prompts,
        typer.Option(
            help="Random tokens; or parts of the text of a trained model, each once, or three times."
        ),
    ] = Prompts.random
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, help="Temperature of sampling, of varlen's systems; 0: most likely tokens."
        ),
    ] = 0.0
    pair: Pair = PAIR

    def prepare(self) -> None:
        """Choose systems and models."""
        if self.quick:
            self.requests, self.rounds = min(self.requests, 8), 1
        self._choose(self.models or (TINY_GPT2 if self.quick else _DEFAULT))
        if self.temperature:
            if not all(system.is_ours for system in self.chosen):
                raise ValueError("temperature is above 0; allowed with --only varlen")
            self.chosen = [replace(each, temperature=self.temperature) for each in self.chosen]

    def _load_model(self, name: str, scratch: Path) -> tuple[Path, Requests]:
        if name in _RANDOM:
            shape, checkpoint = _RANDOM[name], scratch / name
            save_random_decoder(shape, checkpoint)
            sizes = shape.vocabulary, shape.positions
        elif name == LLAMA_TRAINED:
            checkpoint = trained_pair(self.pair)
            sizes = TARGET.vocabulary, TARGET.positions
        else:
            checkpoint = self.repository / TINY_GPT2 / "1"
            sizes = config_field(checkpoint, "vocab_size"), config_field(checkpoint, "n_positions")
        if self.trace is not None:
            requests = trace_requests(self.trace, self.requests, *sizes, self.seed)
        else:
            requests = uniform_requests(self.requests, *sizes, self.seed)
        if self.temperature:
            requests = replace(requests, label=f"{requests.label}, temperature {self.temperature}")
        if self.prompts is Prompts.random:
            return checkpoint, requests
        if name in _RANDOM:
            (text,) = token_ids([_TEXT_TOKENS], sizes[0], self.seed)
        else:
            is_library = name == LLAMA_TRAINED
            documents = library_files(held_out=True) if is_library else python_documents()
            tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
            text = tokenizer.encode("\n\n".join(documents)).ids
        return checkpoint, with_text(requests, text, self.prompts, self.seed)

    def _checked(self, requests: Requests) -> Requests:
        part = requests.part(range(0, len(requests), max(1, len(requests) // _CHECKED_REQUESTS)))
        limits = [min(limit, _CHECKED_TOKENS) for limit in part.limits]
        return Requests.at_once("checked", part.prompts, limits)

    def _prepare_system(
        self, process: WorkerProcess, result: Result, requests: Requests, expected: Answers
    ) -> None:
        answers = ask(process, "measure", self._checked(requests))["answers"]
        if not self.temperature:
            result.equal_tokens = equal_share(answers, expected)

    def _base(self, results: Sequence[Result]) -> Result | None:
        return best_peer(results) or result_of(results, OURS)

    def _after(self, comparison: Comparison) -> Iterable[Result]:
        if SYSTEMS[OURS] not in self.chosen:
            return []
        comparison.report(f"{comparison.model}: decode step")
        argument = {"checkpoint": str(comparison.checkpoint.resolve()), "threads": self.cores}
        result = Result(system=SYSTEMS[OURS], model=comparison.model, arrivals="decode step")
        with noted_failure([result], comparison.report):
            module, log = "varlen_bench.workers.decode_step", comparison.scratch / "limit.log"
            result.rounds.append(ask_once(module, argument, log, threads=self.cores))
        return [result]

    def _derived(self, result: Result, results: Sequence[Result]) -> dict[str, Cell]:  # noqa: ARG002
        return {"tokens": result.work or None}

    def _model_figures(self, results: Sequence[Result]) -> dict[str, Cell]:
        at_once = [result for result in results if result.arrivals == "at once"]
        poisson = [result for result in results if result.arrivals == "poisson"]
        ours, peer = result_of(at_once, OURS), best_peer(at_once)
        # transformers with padded batches that run to their end
        padded = (each for each in at_once if each.system.engine == "transformers")
        static = fastest(each for each in padded if each.system.batching != "engine")
        # the first tokens of the best peer, whichever has them first
        firsts = [result.median("ttft_p99_ms") for result in poisson if not result.system.is_ours]
        first, soonest = result_of(poisson, OURS), min(filter(None, firsts), default=None)
        drafting = result_of(at_once, DRAFTING)
        step = next((each for each in results if each.arrivals == "decode step"), None)
        step_ms, limit_ms = ((step.median(n) if step else None) for n in ("step_ms", "limit_ms"))
        return {
            "vs_static_batch": speed_ratio(ours, static),
            "vs_best_peer": speed_ratio(ours, peer),
            "vs_request_level": speed_ratio(ours, result_of(at_once, REQUEST_LEVEL)),
            "ttft_p99_ratio": rounded(
                ratio(first.median("ttft_p99_ms") if first else None, soonest)
            ),
            "best_peer": peer.system.name if peer else None,
            "tokens_per_second": rounded(ours.median("tokens_per_second") if ours else None, 1),
            "decode_fraction_of_limit": rounded(ratio(limit_ms, step_ms)),
            "drafts_vs_none": speed_ratio(drafting, ours),
            "draft_model_vs_none": speed_ratio(result_of(at_once, MODEL_DRAFTING), ours),
        }


def equal_share(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that are as expected."""
    pairs = [
        ours == theirs
        for row, wanted in zip(tokens, expected, strict=True)
        for ours, theirs in zip(row, wanted, strict=True)
    ]
    return sum(pairs) / len(pairs)


def uniform_requests(count: int, vocabulary: int, positions: int, seed: int) -> Requests:
    """Return requests of uniform prompt and output lengths, all at once."""
    lengths = _uniform(PROMPT_TOKENS, count, seed), _uniform(ANSWER_TOKENS, count, seed + 1)
    prompts, outputs = _fitted(*lengths, positions=positions)
    label = f"prompts {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]}, outputs {ANSWER_TOKENS[0]}-{ANSWER_TOKENS[1]}"
    return Requests.at_once(label, token_ids(prompts, vocabulary, seed), outputs)


def with_text(requests: Requests, text: Sequence[int], kind: Prompts, seed: int) -> Requests:
    """Return requests with prompts of the same lengths from a text.

    Args:
        kind: `repeated` for prompts that have a part of the text three times.
    """
    numbers, prompts = random.Random(seed), []
    times = _TIMES if kind is Prompts.repeated else 1
    for length in map(len, requests.prompts):
        size = -(-length // times)
        begin = numbers.randrange(len(text) - size)
        prompts.append([*text[begin : begin + size]] * times)
        del prompts[-1][length:]
    return replace(requests, label=f"{requests.label}, {kind.value}", prompts=prompts)


def trace_requests(path: Path, count: int, vocabulary: int, positions: int, seed: int) -> Requests:
    """Return consecutive requests of a trace, all at once.

    If more than one request in a hundred exceeds `positions`, all lengths are divided so that 99 % fit.

    Raises:
        ValueError: the file is no trace.
    """
    pairs = [(each.tokens, each.generated or 1) for each in read_generation_trace(path)]
    divisor = fitting_divisor([sum(pair) for pair in pairs], positions)
    first = random.Random(seed).randrange(len(pairs))
    taken = [pairs[(first + i) % len(pairs)] for i in range(count)]
    lengths = [[max(1, round(length / divisor)) for length in pair] for pair in taken]
    prompts, outputs = _fitted(
        [prompt for prompt, _ in lengths], [count for _, count in lengths], positions=positions
    )
    label = f"trace {path.stem}" + (f" / {divisor:.3g}" if divisor > 1 else "")
    return Requests.at_once(label, token_ids(prompts, vocabulary, seed), outputs)


def _uniform(limits: tuple[int, int], count: int, seed: int) -> list[int]:
    return Mix("", "", tuple(range(limits[0], limits[1] + 1))).take(count, seed)


def _fitted(
    prompts: Sequence[int], outputs: Sequence[int], *, positions: int
) -> tuple[list[int], list[int]]:
    """Return lengths that fit the positions of a model: outputs first, then prompts."""
    short = [min(count, positions - 1) for count in outputs]
    fitting = [min(length, positions - count) for length, count in zip(prompts, short, strict=True)]
    return fitting, short


app = command(GenerateSubject)

if __name__ == "__main__":
    app()
