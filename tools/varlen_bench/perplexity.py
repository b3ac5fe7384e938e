"""The perplexity of tiny_gpt2 with weights of few bits.

Ours keeps codes; transformers has the floats that they stand for. docs/benchmarks/generate.md has the method;
`python -m varlen_bench.perplexity` appends rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from varlen_bench.compare.subject import Subject, command
from varlen_bench.generate import TINY_GPT2
from varlen_bench.harness.command import Progress
from varlen_bench.harness.rows import Cell
from varlen_bench.peers.checkpoints import load_generator, save_gptq
from varlen_tools.train_demo.__main__ import python_documents

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = "model.safetensors"
# Bits, and inputs of a group.
_FORMS = ((8, 128), (4, 32), (4, 128))
# Texts that the model has learned, and tokens of each.
_TEXTS, _TOKENS = 64, 128


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a system; `bits` and `group` are 0 for a model in floats."""

    bits: int
    group: int
    system: str
    perplexity: float


@dataclass(kw_only=True)
class PerplexitySubject(Subject[Perplexity]):
    """Compare the perplexity of tiny_gpt2 in floats and in weights of few bits."""

    name: ClassVar = "perplexity"
    packages: ClassVar = ("torch", "transformers", "varlen")

    repository: Annotated[Path, typer.Option(help="Model repository of the tiny model.")] = Path(
        "model_repository"
    )

    def measure(self, progress: Progress) -> Iterator[list[Perplexity]]:
        """Yield the perplexities of the model in floats, then of each form."""
        checkpoint = self.repository / TINY_GPT2 / "1"
        texts = _texts(checkpoint)[: 4 if self.quick else _TEXTS]
        yield self._found((0, 0), checkpoint, checkpoint, texts)
        for bits, group in _FORMS:
            progress(f"{bits} bits in groups of {group}")
            with TemporaryDirectory(prefix="varlen-perplexity-") as scratch:
                widened, codes = Path(scratch, "widened"), Path(scratch, "codes")
                shutil.copytree(checkpoint, widened)
                floats = save_gptq(checkpoint, codes, bits=bits, group=group)
                save_file(load_file(widened / _WEIGHTS) | floats, widened / _WEIGHTS)
                yield self._found((bits, group), widened, codes, texts)

    def _found(
        self, form: tuple[int, int], floats: Path, codes: Path, texts: Sequence[Tensor]
    ) -> list[Perplexity]:
        model = load_generator("AutoModelForCausalLM", floats, self.cores)
        theirs = [model(text[None]).logits[0].detach() for text in texts]
        systems = {"transformers-fp32": theirs}
        systems |= {f"varlen-{dtype}": _ours(codes, texts, dtype) for dtype in ("fp32", "bf16")}
        return [
            Perplexity(*form, name, perplexity(logits, texts)) for name, logits in systems.items()
        ]

    def rows(self, results: Sequence[Perplexity]) -> list[Mapping[str, Cell]]:
        """Return the CSV rows of results."""
        return [{**asdict(each), "perplexity": f"{each.perplexity:.4f}"} for each in results]

    def figures(self, results: Sequence[Perplexity]) -> Mapping[str, Cell]:
        """Return the largest relative difference to transformers with the same weights."""
        theirs = {(each.bits, each.group): each for each in reversed(results)}
        worst = max(
            abs(each.perplexity / theirs[each.bits, each.group].perplexity - 1) for each in results
        )
        return {"largest_difference": round(worst, 5)}


def _texts(checkpoint: Path) -> list[Tensor]:
    import torch

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode("\n\n".join(python_documents())).ids)
    return list(torch.split(ids[: _TEXTS * _TOKENS], _TOKENS))


def perplexity(logits: Sequence[Tensor], texts: Sequence[Tensor]) -> float:
    """Return the perplexity of texts, given the logits of all their tokens, `[tokens, vocabulary]` each."""
    import torch

    chosen = [
        each.float().log_softmax(1)[:-1].gather(1, text[1:, None])
        for each, text in zip(logits, texts, strict=True)
    ]
    return float(torch.cat(chosen).double().mean().neg().exp())


def _ours(folder: Path, texts: Sequence[Tensor], dtype: str) -> list[Tensor]:
    """Return logits of the steps of a generator that keeps codes."""
    import torch

    from varlen.execution.int8.layer_inputs import CALIBRATION_KV, CalibratedDecoder
    from varlen.execution.programs import record_steps
    from varlen.models.checkpoint_folder import Checkpoint
    from varlen.models.loading import load_decoder
    from varlen_kernels import cpu

    checkpoint, device = Checkpoint.open(folder), torch.device("cpu")
    number = torch.float32 if dtype == "fp32" else torch.bfloat16
    model = load_decoder(checkpoint, number, device, keeps_codes=True)
    programs = record_steps(model, replace(CALIBRATION_KV, dtype=number))
    decoder = CalibratedDecoder(programs, checkpoint)
    logits: list[Tensor] = []
    for text in texts:
        logits += decoder.run(programs, cpu, decoder.prompts([text.int().numpy()]))
    return logits


app = command(PerplexitySubject)

if __name__ == "__main__":
    app()
