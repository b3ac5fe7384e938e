"""The process of a system with several outputs: calibration, answers, and timed passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from varlen_bench.compare.systems import System
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.peers.checkpoints import config_field, load_encoder
from varlen_bench.peers.engines import Cores, Precision, pad, varlen_encoder
from varlen_bench.workers.encoder import BatchWorker, Workload, handler

if TYPE_CHECKING:
    from varlen.tasks import Task

# Further tasks of the model, beside its dense vector.
_FURTHER = ("sparse_embed", "token_embed")
# Tokens without a weight, by their names in tokenizer_config.json.
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")

# Outputs of a text by task: a vector, weights by term, or a vector of each token.
Row: TypeAlias = dict[str, Any]
# Returns the outputs of a batch of token ids for tasks.
Outputs: TypeAlias = Callable[[list[list[int]], Sequence[str]], list[Row]]


class OutputsWorker(BatchWorker[Outputs, list[Row]]):
    """An engine with several outputs.

    A workload without names of outputs asks a model of one task.
    """

    def __init__(self, system: System, load: Callable[[], Outputs], *, terms: int, instances: int):
        """Load an engine.

        Args:
            terms: size of the vocabulary.
        """
        super().__init__(system, load, instances)
        self._terms = terms

    def answer(self, workload: Workload, batch: list[list[int]]) -> list[Row]:
        """Return the outputs of a batch."""
        return self.engine(batch, workload.outputs)

    def answer_all(self, name: str) -> list[Row]:
        """Return the outputs of a whole workload, in order of arrival."""
        rows: dict[int, Row] = {}
        for batch, found in self.answers(name):
            rows |= zip(batch, found, strict=True)
        return [rows[index] for index in range(len(rows))]

    def vectors(self, name: str) -> Vectors:
        """Return the last output of each text as one row.

        Terms fill the vocabulary; vectors of tokens, all of length 1, stand side by side, so that a cosine of rows is
        the mean of theirs.
        """
        workload = self.workloads[name]
        task = workload.outputs[-1] if workload.outputs else "embed"
        found = [row[task] for row in self.answer_all(name)]
        if task == "embed":
            return np.stack(found)
        if task == "sparse_embed":
            filled = np.zeros((len(found), self._terms), np.float32)
            for into, weights in zip(filled, found, strict=True):
                pairs = list(weights.items()) if isinstance(weights, dict) else weights
                terms, values = np.array(pairs, np.float64).reshape(-1, 2).T
                into[terms.astype(int)] = values
            return filled
        longest = max(map(len, found))
        filled = np.zeros((len(found), longest, found[0].shape[1]), np.float32)
        for into, rows in zip(filled, found, strict=True):
            into[: len(rows)] = rows
        return filled.reshape(len(found), -1)


def _varlen(checkpoint: Path, precision: Precision, cores: Cores) -> Outputs:
    alone = varlen_encoder(checkpoint, precision, cores)
    several = varlen_encoder(checkpoint, precision, cores, outputs=",".join(_FURTHER))

    def answer(batch: list[list[int]], tasks: Sequence[str]) -> list[Row]:
        if not tasks:
            return [{"embed": vector} for vector in alone.embed(batch, normalize=True)]
        rows: Any = several.outputs(batch, cast("Sequence[Task]", tasks), normalize=True)
        found: list[Row] = rows
        return found

    return answer


def _transformers(checkpoint: Path, precision: Precision, cores: Cores) -> Outputs:
    """Return the recipe of FlagEmbedding over transformers' encoder, heads in the encoder's precision.

    Source: inference/embedder/encoder_only/m3.py and finetune/embedder/encoder_only/m3/modeling.py of FlagEmbedding.
    """
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(cores.threads)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    encoder = load_encoder(checkpoint, dtype, torch.device("cpu"), "sdpa")
    sparse, vectors = (
        _linear(checkpoint / f"{name}.pt", dtype) for name in ("sparse_linear", "colbert_linear")
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    special = tokenizer.special_tokens_map
    unweighted = {
        tokenizer.convert_tokens_to_ids(special[name]) for name in _UNWEIGHTED if name in special
    }

    def weights_of(ids: list[int], weights: npt.NDArray[np.float32]) -> dict[int, float]:
        largest: dict[int, float] = {}
        for token, weight in zip(ids, weights, strict=False):
            if token not in unweighted and weight > max(0, largest.get(token, 0)):
                largest[token] = weight
        return largest

    @torch.inference_mode()
    def answer(batch: list[list[int]], tasks: Sequence[str]) -> list[Row]:
        ids, mask = (torch.from_numpy(array) for array in pad(batch))
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        rows: list[Row] = [{} for _ in batch]
        if "embed" in tasks or not tasks:
            dense = torch.nn.functional.normalize(hidden[:, 0], dim=-1).float().numpy()
            for row, vector in zip(rows, dense, strict=True):
                row["embed"] = vector
        if "sparse_embed" in tasks:
            weights = torch.relu(sparse(hidden)).squeeze(-1).float().numpy()
            for row, sequence, each in zip(rows, batch, weights, strict=True):
                row["sparse_embed"] = weights_of(sequence, each)
        if "token_embed" in tasks:
            found = vectors(hidden[:, 1:]) * mask[:, 1:, None].to(dtype)
            found = torch.nn.functional.normalize(found, dim=-1).float().numpy()
            for row, sequence, each in zip(rows, batch, found, strict=True):
                row["token_embed"] = each[: len(sequence) - 1]
        return rows

    return answer


def _linear(file: Path, dtype: Any) -> Any:
    """Return a linear layer of a file of torch."""
    import torch

    state = torch.load(file, weights_only=True)
    layer = torch.nn.Linear(*state["weight"].shape[::-1])
    layer.load_state_dict(state)
    return layer.to(dtype).eval()


def start(argument: Message) -> Callable[[Message], Message]:
    """Load a system; return the function that answers its orders."""
    system, cores = System(**argument["system"]), Cores(**argument["cores"])
    checkpoint = Path(argument["checkpoint"])
    load = partial(
        _varlen if system.is_ours else _transformers, checkpoint, system.precision, cores
    )
    worker = OutputsWorker(
        system,
        load,
        terms=config_field(checkpoint, "vocab_size"),
        instances=cores.instances,
    )
    return handler(worker, argument)


if __name__ == "__main__":
    run_worker(start)
