"""Encoders, their heads, and decoders' hidden states: served as transformers computes them.

Requests come alone, and many at once, so that they share batches.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer

from tests.checkpoints import SMALL_DECODERS, SMALL_ENCODERS, save_checkpoint
from tests.closeness import encoder_roundings, relative_error
from tests.server.clients import AnswerError, texts
from tests.server.serving import add_model, load, unload

from ..endings import Ending
from ..models import CACHED
from ..phase import Campaign, Report, attacked_server
from ..target import Target

Floats = npt.NDArray[np.float32]

_HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification")
_ENCODERS = ("Bert", *SMALL_ENCODERS)
_T5_ENCODERS = ("T5EncoderModel", "MT5EncoderModel")
_TEXTS = ("the cat", "a", "river, the river! is it 42?", "x" * 40, "is the cat in a river, 7 times")
# Requests that arrive together, and so share batches.
_TOGETHER = 20
# Models: most of the time goes into loads, which keep one core busy.
_LOADED_TOGETHER = 2
# Least cosine of a bf16 answer to the answer of transformers in fp32.
_BF16_COSINE = 0.999


def kinds() -> Iterator[str]:
    """Yield the classes of transformers whose checkpoints are served as encoders."""
    for family in (*_ENCODERS, *SMALL_DECODERS):
        # Gemma3Model also reads pictures
        name = f"{family}Text" if hasattr(transformers, f"{family}TextModel") else family
        for head in _HEADS:
            # GPT-2 classifies padded rows; it is not served so
            if hasattr(transformers, name + head) and not (family == "GPT2" and head != "Model"):
                yield name + head
    yield from _T5_ENCODERS


def families(campaign: Campaign, report: Report, _seconds: float) -> None:
    """Compare each architecture's answers in fp32, some in bf16 too, however long it takes."""
    transformers.utils.logging.disable_progress_bar()
    making = Lock()
    with attacked_server(campaign, report, (CACHED,)) as target:

        def compare(kind: str) -> int:
            # the generator of random weights is one for all threads
            with making:
                folder = campaign.scratch / "families" / kind
                save_checkpoint(folder, kind, **_labels(kind))
                expected = _answers_of_transformers(folder, kind)
            dtypes = ("fp32", "bf16") if kind.endswith("Model") else ("fp32",)
            for dtype in dtypes:
                _check(target, report, f"{kind.lower()}-{dtype}", folder, dtype, expected)
            return len(dtypes)

        with ThreadPoolExecutor(_LOADED_TOGETHER) as pool:
            report.count("architectures and dtypes", sum(pool.map(compare, kinds())))


def _labels(kind: str) -> dict[str, int]:
    return {} if kind.endswith("Model") else {"num_labels": 3, "pad_token_id": 0}


@torch.inference_mode()
def _answers_of_transformers(folder: Path, kind: str) -> list[Floats]:
    """Return the hidden states or logits of each text, each computed by itself in fp32."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for text in _TEXTS:
        ids = torch.tensor([tokenizer.encode(text).ids])
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        found = output.last_hidden_state if kind.endswith("Model") else output.logits
        answers.append(found[0].numpy())
    return answers


def _check(
    target: Target,
    report: Report,
    name: str,
    folder: Path,
    dtype: str,
    expected: Sequence[Floats],
) -> None:
    repository = target.server.model_repository
    task = {"task": "hidden"} if "model" in name else {}
    add_model(repository, name, folder, dtype=dtype, **task)
    reason = load(target.server, name)
    if reason is not None:
        report.ledger.add(name, "load", Ending("wrong", message=reason))
        return
    error = relative_error(encoder_roundings(folder))

    def ask(number: int) -> None:
        place, client = number % len(_TEXTS), (target.grpc, target.http)[number % 2]
        try:
            answer = client.infer(name, texts(_TEXTS[place]))[0]
        except AnswerError as failure:
            report.ledger.add(name, "family", Ending("wrong", message=str(failure)))
            return
        difference = _difference(answer, expected[place], error if dtype == "fp32" else None)
        end = Ending("wrong", message=difference) if difference else Ending("right")
        report.ledger.add(f"{name} {_TEXTS[place]!r}", "family", end)

    for number in range(len(_TEXTS)):
        ask(number)
    with ThreadPoolExecutor(_TOGETHER) as pool:
        list(pool.map(ask, range(_TOGETHER)))
    unload(target.server, name)


def _difference(answer: Floats, expected: Floats, error: float | None) -> str:
    """Return how an answer differs from the expected one; empty if rounding explains it.

    Args:
        error: the largest difference relative to the largest magnitude; None compares directions.
    """
    if answer.shape != expected.shape:
        return f"the shape is {answer.shape} instead of {expected.shape}"
    largest, found = np.abs(expected).max(), np.abs(answer - expected).max()
    if error is not None:
        return "" if found <= error * largest else f"it is {found / largest:.2e} off"
    cosine = (answer * expected).sum() / np.linalg.norm(answer) / np.linalg.norm(expected)
    return "" if cosine >= _BF16_COSINE else f"its cosine is {cosine:.5f}"
