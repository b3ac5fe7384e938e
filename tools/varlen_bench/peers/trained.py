"""A Llama and its draft model, trained on the code of Python's library.

Random models agree in no token, and the perplexity of random weights says nothing. Every Python installation holds this
text. One file in ten is held out, for prompts that neither model has seen.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen_bench.peers.checkpoints import LlamaShape, llama_of, save_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

TARGET = LlamaShape("target", 512, 8, 8, key_heads=4, features=1536, positions=512, vocabulary=4096)
DRAFT = LlamaShape("draft", 256, 2, 4, key_heads=2, features=768, positions=512, vocabulary=4096)
_HELD_OUT = 10
# A step of the target takes several seconds of a core.
_STEPS, _SAMPLES = {TARGET.name: 80, DRAFT.name: 160}, 4
_REPORTED_STEPS = 20


def library_files(*, held_out: bool) -> list[str]:
    """Return the texts of modules of Python's library, in the order of their names."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    return [
        path.read_text(encoding="utf-8")
        for number, path in enumerate(paths)
        if (number % _HELD_OUT == 0) == held_out
    ]


def trained_pair(folder: Path) -> Path:
    """Return the checkpoint of the target in a folder; train the models that it lacks."""
    for shape in (TARGET, DRAFT):
        if not (folder / shape.name / "model.safetensors").exists():
            _train(shape, folder / shape.name, _STEPS[shape.name])
    return folder / TARGET.name


def _train(shape: LlamaShape, checkpoint: Path, steps: int) -> None:
    import torch

    from varlen_tools.train_demo.loop import fit
    from varlen_tools.train_demo.train import END_OF_TEXT, encode, train_tokenizer, windows_of
    from varlen_tools.train_demo.transformer import Shape, Training

    documents = library_files(held_out=False)
    # the same text gives both models the same one
    tokenizer = train_tokenizer(documents, shape.vocabulary)
    token_ids = encode(tokenizer, documents)
    sizes = Shape(shape.vocabulary, shape.positions, shape.hidden, shape.layers, shape.heads)
    training = Training(sizes, steps, _SAMPLES)
    draw = torch.Generator().manual_seed(training.seed)

    def loss_of_step(model: Any) -> Tensor:
        windows = windows_of(token_ids, training, draw)
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(input_ids=windows, labels=windows).loss
        return loss

    def report(step: int, loss: float) -> None:
        if step % _REPORTED_STEPS == 0:
            print(f"{checkpoint}: step {step} of {steps}, loss {loss:.2f}", file=sys.stderr)

    model = fit(lambda _: llama_of(shape), training, loss_of_step, report)
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    save_tokenizer(tokenizer, checkpoint, end)
    model.save_pretrained(checkpoint)
