"""Small random checkpoints, as transformers saves them, and the real one that `make setup` fetches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parents[2]
MINILM = ROOT / "model_repository" / "minilm" / "1"

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "river",
    *_LETTERS,
    *(f"##{letter}" for letter in _LETTERS),
]

SMALL = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}


def small_tokenizer(*, special_tokens: bool = True) -> Tokenizer:
    """Return a lower-casing WordPiece tokenizer over letters and a few words."""
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    return tokenizer


MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return a function that saves a random BERT and returns its folder."""

    def make(
        kind: str = "BertModel",
        *,
        files: dict[str, Any] | None = None,
        save: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **config: Any,
    ) -> Path:
        """Save a checkpoint of the transformers class `kind`.

        Args:
            files: JSON files to add, by path.
            save, model: more arguments of save_pretrained and of the class.
            config: what differs from `SMALL`.
        """
        folder = tmp_path_factory.mktemp("checkpoint")
        torch.manual_seed(0)
        settings = {**SMALL, **config}
        # so large that a wrong layer shows, so small that rounding is not magnified
        settings.setdefault("initializer_range", settings["hidden_size"] ** -0.5)
        made = getattr(transformers, kind)(transformers.BertConfig(**settings), **(model or {}))
        # transformers starts biases at zero and norms at one, which would hide a mix-up
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        made.save_pretrained(folder, **(save or {}))
        small_tokenizer().save(str(folder / "tokenizer.json"))
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture(scope="session")
def small_bert(make_checkpoint: MakeCheckpoint) -> Path:
    """Return one plain checkpoint that tests read and do not change."""
    return make_checkpoint()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of the real MiniLM checkpoint."""
    if not (MINILM / "model.safetensors").is_file():
        pytest.fail("model_repository/minilm/1 has no weights; run `make setup` to fetch them")
    return MINILM


@pytest.fixture
def rng() -> np.random.Generator:
    """Return random numbers that are the same in every run."""
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the same on a machine with a GPU; `tests/kernels/fused/test_encoder.py` is what uses one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
