"""The perplexity of trained models with weights of few bits.

Ours keeps codes; transformers has the floats that they stand for. docs/benchmarks/generate.md has the method;
`python -m varlen_bench.perplexity` appends rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from varlen_bench.compare.subject import Subject, command
from varlen_bench.generate import LLAMA_TRAINED, PAIR, TINY_GPT2, Pair
from varlen_bench.harness.command import Progress, select
from varlen_bench.harness.rows import Cell
from varlen_bench.peers.checkpoints import load_generator, save_gptq, save_nf4
from varlen_bench.peers.gguf_files import widened_gguf, write_gguf
from varlen_bench.peers.trained import library_files, trained_pair
from varlen_tools.gguf_checkpoint import convert_gguf
from varlen_tools.train_demo.__main__ import python_documents

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a checkpoint.

    Attributes:
        bits, group: bits of a code, and inputs with one scale; 0 for a model in floats.
        save: writes a checkpoint in this form into a folder, and returns the floats that it stands for, by name.
    """

    name: str
    bits: int
    group: int
    save: Callable[[Path, Path], dict[str, Tensor]]


def _save_floats(checkpoint: Path, folder: Path) -> dict[str, Tensor]:
    shutil.copytree(checkpoint, folder)
    return {}


def _save_from_gguf(checkpoint: Path, folder: Path, *, kind: str) -> dict[str, Tensor]:
    """Save what `fetch` makes of a GGUF file."""
    path = folder.with_suffix(".gguf")
    write_gguf(checkpoint, path, kind, with_tokenizer=True)
    folder.mkdir()
    convert_gguf(path, folder, lambda _: None)
    return widened_gguf(checkpoint, kind)


_FLOATS = Form("floats", 0, 0, _save_floats)
_GPTQ = tuple(
    Form("gptq", bits, group, partial(save_gptq, bits=bits, group=group))
    for bits, group in ((8, 128), (4, 32), (4, 128))
)
_GGUF = tuple(
    Form(kind, bits, group, partial(_save_from_gguf, kind=kind))
    for kind, bits, group in (("Q8_0", 8, 32), ("Q6_K", 6, 16), ("Q5_K", 5, 32), ("Q4_K", 4, 32))
)
# GPT-2 has no other form here.
_FORMS = {
    TINY_GPT2: (_FLOATS, *_GPTQ),
    LLAMA_TRAINED: (_FLOATS, *_GPTQ, Form("nf4", 4, 64, save_nf4), *_GGUF),
}
# Number of texts, and tokens of each.
_TEXTS, _TOKENS = 64, 128


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a system, for a form of a model."""

    model: str
    form: str
    bits: int
    group: int
    system: str
    perplexity: float


@dataclass(kw_only=True)
class PerplexitySubject(Subject[Perplexity]):
    """Compare the perplexity of trained models in floats and in weights of few bits."""

    name: ClassVar = "perplexity"
    packages: ClassVar = ("torch", "transformers", "gguf", "varlen")

    models: Annotated[
        str, typer.Option(help=f"{', '.join(_FORMS)}; comma-separated, by default all.")
    ] = ""
    repository: Annotated[Path, typer.Option(help="Model repository of the tiny model.")] = Path(
        "model_repository"
    )
    pair: Pair = PAIR

    def measure(self, progress: Progress) -> Iterator[list[Perplexity]]:
        """Yield the perplexities of each form of each model."""
        for model in select(self.models, _FORMS):
            if model == LLAMA_TRAINED:
                checkpoint, documents = trained_pair(self.pair), library_files(held_out=True)
            else:
                checkpoint, documents = self.repository / model / "1", python_documents()
            texts = _texts(checkpoint, documents)[: 4 if self.quick else _TEXTS]
            for form in _FORMS[model]:
                progress(f"{model}: {form.name}, {form.bits} bits in groups of {form.group}")
                with TemporaryDirectory(prefix="varlen-perplexity-") as scratch:
                    widened, codes = Path(scratch, "widened"), Path(scratch, "codes")
                    shutil.copytree(checkpoint, widened)
                    floats = form.save(checkpoint, codes)
                    save_file(load_file(widened / _WEIGHTS) | floats, widened / _WEIGHTS)
                    yield self._found(model, form, widened, codes, texts)

    def _found(
        self, model: str, form: Form, floats: Path, codes: Path, texts: Sequence[Tensor]
    ) -> list[Perplexity]:
        theirs = load_generator("AutoModelForCausalLM", floats, self.cores)
        systems = {
            "transformers-fp32": [theirs(text[None]).logits[0].detach() for text in texts],
            **_ours(codes, texts),
        }
        return [
            Perplexity(model, form.name, form.bits, form.group, name, perplexity(logits, texts))
            for name, logits in systems.items()
        ]

    def rows(self, results: Sequence[Perplexity]) -> list[Mapping[str, Cell]]:
        """Return the CSV rows of results."""
        return [{**asdict(each), "perplexity": f"{each.perplexity:.4f}"} for each in results]

    def figures(self, results: Sequence[Perplexity]) -> Mapping[str, Cell]:
        """Return the largest relative difference to transformers with the same weights."""
        theirs = {_weights_of(each): each.perplexity for each in reversed(results)}
        worst = max(abs(each.perplexity / theirs[_weights_of(each)] - 1) for each in results)
        return {"largest_difference": round(worst, 5)}


def _weights_of(result: Perplexity) -> tuple[str, str, int, int]:
    return result.model, result.form, result.bits, result.group


def _texts(checkpoint: Path, documents: Sequence[str]) -> list[Tensor]:
    import torch

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode("\n\n".join(documents)).ids)
    return list(torch.split(ids[: _TEXTS * _TOKENS], _TOKENS))


def perplexity(logits: Sequence[Tensor], texts: Sequence[Tensor]) -> float:
    """Return the perplexity of texts, given the logits of all their tokens, `[tokens, vocabulary]` each."""
    import torch

    chosen = [
        each.float().log_softmax(1)[:-1].gather(1, text[1:, None])
        for each, text in zip(logits, texts, strict=True)
    ]
    return float(torch.cat(chosen).double().mean().neg().exp())


def _ours(folder: Path, texts: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Return logits of the steps of a generator that keeps codes, in fp32 and bf16."""
    import torch

    from varlen.execution.int8.layer_inputs import CalibratedDecoder, calibration_kv
    from varlen.execution.programs import record_steps
    from varlen.models.checkpoint_folder import Checkpoint
    from varlen.models.loading import load_decoder
    from varlen.program.program import Program
    from varlen_kernels import cpu

    checkpoint, device = Checkpoint.open(folder), torch.device("cpu")

    def record(dtype: torch.dtype) -> tuple[Program, ...]:
        model = load_decoder(checkpoint, dtype, device, keeps_codes=True)
        return record_steps(model, calibration_kv(dtype))

    decoder = CalibratedDecoder(record, checkpoint)
    recorded = {"varlen-fp32": decoder.programs, "varlen-bf16": record(torch.bfloat16)}
    prompts = [decoder.prompts([text.int().numpy()]) for text in texts]
    return {
        name: [logits for prompt in prompts for logits in decoder.run(programs, cpu, prompt)]
        for name, programs in recorded.items()
    }


app = command(PerplexitySubject)

if __name__ == "__main__":
    app()
