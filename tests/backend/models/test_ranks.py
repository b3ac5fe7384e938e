"""Families that ranks divide.

The parts are the whole, and N ranks give what one process gives.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from threading import Barrier

import numpy as np
import pytest
import torch

from tests.closeness import assert_close, encoder_roundings
from tests.quantized import save_quantized
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution import programs
from varlen.execution.rank_link import NO_OTHERS
from varlen.execution.runner import Runner
from varlen.execution.token_state import NoChooser
from varlen.models.checkpoint.layers import Linear, TokenTable
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder, load_encoder
from varlen.models.registry import FAMILIES
from varlen.program.rank import RANKS, Rank
from varlen.program.stages import NO_STAGES
from varlen.request.request import DEFAULT_OPTIONS, Prompt
from varlen_kernels.reference.rank_memory import rank_words

from .divided import CONFIG, DECODERS, ENCODERS, HEADS, MODELS, TRANSLATORS, logits_of

CPU = torch.device("cpu")
TYPES = "embeddings.token_type_embeddings.weight"


class ThreadLink:
    """The link of a rank that is a thread: a `RankLink`."""

    def __init__(self, rank, memory, decided, barrier):
        self.rank, self.states = rank, {RANKS: memory}
        self.stage, self.handoffs = NO_STAGES, None
        self._decided, self._barrier = decided, barrier

    def agree(self, decide, meanwhile=None):
        del meanwhile
        if not self.rank.number:
            self._decided.append(decide())
        self._barrier.wait(60)
        value = self._decided[-1]
        self._barrier.wait(60)
        return value

    def fault_of_ranks(self, fault):
        self._decided.append(fault)
        self._barrier.wait(60)
        found = max(self._decided[-self.rank.size :])
        self._barrier.wait(60)
        return found

    def running(self, work):
        del work
        return nullcontext()


def on_ranks(size, run):
    """Return what `run` returns for the link of each rank, all at the same time."""
    memory, decided = torch.zeros(rank_words(size), dtype=torch.int64), []
    barrier = Barrier(size)
    links = [ThreadLink(Rank(number, size), memory, decided, barrier) for number in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return [job.result() for job in [pool.submit(run, link) for link in links]]


def load(checkpoint, rank):
    is_generator = checkpoint.is_decoder and checkpoint.task == "generate"
    if is_generator or checkpoint.translate is not None:
        return load_decoder(checkpoint, torch.float32, CPU, rank)
    return load_encoder(checkpoint, torch.float32, CPU, rank)


def parts_of(model) -> Iterator[Linear | TokenTable]:
    """Yield the linear layers and the tables of a model, in order."""
    if isinstance(model, Linear | TokenTable):
        yield model
    elif isinstance(model, tuple | list):
        for each in model:
            yield from parts_of(each)
    elif is_dataclass(model):
        for each in fields(model):
            yield from parts_of(getattr(model, each.name))


def rows_of(*matrices):
    """Return the different rows of matrices."""
    return np.unique(np.concatenate([each.numpy() for each in matrices]), axis=0)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", MODELS)
def test_parts_of_all_ranks_are_the_whole(make_checkpoint, kind, size):
    checkpoint = Checkpoint.open(make_checkpoint(kind, **MODELS[kind]))

    whole = list(parts_of(load(checkpoint, Rank())))
    ranks = [list(parts_of(load(checkpoint, Rank(number, size)))) for number in range(size)]

    divided = 0
    for one, *parts in zip(whole, *ranks, strict=True):
        if isinstance(one, TokenTable):
            assert torch.equal(torch.cat([part.rows for part in parts]), one.weight)
            assert all(not part.weight[-1].any() for part in parts)
        elif parts[0].is_partial:
            assert torch.equal(torch.cat([part.weight for part in parts]), one.weight)
            assert all(part.bias is None for part in parts[1:])
            assert (one.bias is None) == (parts[0].bias is None)
            assert one.bias is None or torch.equal(parts[0].bias, one.bias)
        else:
            # outputs of several meanings are divided one by one, and key heads may be held twice
            columns = [part.weight.t() for part in parts]
            np.testing.assert_array_equal(rows_of(*columns), rows_of(one.weight.t()))
            if one.bias is not None:
                biases = [part.bias[:, None] for part in parts]
                np.testing.assert_array_equal(rows_of(*biases), rows_of(one.bias[:, None]))
        divided += parts[0].weight.numel() < one.weight.numel()
    assert divided >= len(whole) - 3


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("BertModel", {"embeddings.position_embeddings.weight", TYPES}),
        ("GPT2LMHeadModel", {"transformer.wpe.weight"}),
        ("Qwen3ForCausalLM", set()),
        ("T5ForConditionalGeneration", set()),
    ],
)
def test_a_rank_reads_no_whole_matrix_but_tables_without_tokens(
    make_checkpoint, monkeypatch, kind, expected
):
    checkpoint = Checkpoint.open(make_checkpoint(kind, **MODELS[kind]))
    read, whole = CheckpointWeights.read, set()

    def recorded(weights, name, *shape):
        if len(shape) > 1:
            whole.add(name)
        return read(weights, name, *shape)

    monkeypatch.setattr(CheckpointWeights, "read", recorded)
    load(checkpoint, Rank(1, 2))

    assert whole == expected


@pytest.mark.parametrize("kind", ENCODERS)
def test_ranks_of_an_encoder_give_what_one_process_gives(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind, **ENCODERS[kind])
    checkpoint = Checkpoint.open(folder)
    prompts = [Prompt(rng.integers(5, 40, n, dtype=np.int32)) for n in (9, 1, 30)]
    options = [DEFAULT_OPTIONS] * len(prompts)
    expected = Runner(checkpoint, CONFIG).run(prompts, options)

    def run(link):
        return Runner(checkpoint, CONFIG, link=link).run(prompts, options)

    for answers in on_ranks(2, run):
        for found, one in zip(answers, expected, strict=True):
            assert_close(found, one, roundings=encoder_roundings(folder))


def test_ranks_round_sums_in_bf16_as_one_process_does(make_checkpoint, rng):
    folder = make_checkpoint("BertModel", **HEADS)
    checkpoint, config = Checkpoint.open(folder), replace(CONFIG, dtype="bf16")
    prompts = [Prompt(rng.integers(5, 40, n, dtype=np.int32)) for n in (9, 30)]
    options = [DEFAULT_OPTIONS] * len(prompts)
    expected = Runner(checkpoint, CONFIG).run(prompts, options)

    first, second = on_ranks(
        2, lambda link: Runner(checkpoint, config, link=link).run(prompts, options)
    )

    # each partial sum is rounded too, which doubles the roundings at most
    roundings = 2 * encoder_roundings(folder, torch.bfloat16)
    for found, other, one in zip(first, second, expected, strict=True):
        np.testing.assert_array_equal(found, other)
        assert_close(found, one, roundings=roundings, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "kind, size",
    [
        *((kind, 2) for kind in (*DECODERS, *TRANSLATORS)),
        *((kind, 4) for kind in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MarianMTModel")),
    ],
)
def test_ranks_of_a_generator_give_the_logits_of_one_process(make_checkpoint, kind, size):
    checkpoint = Checkpoint.open(make_checkpoint(kind, **MODELS[kind]))

    expected = logits_of(Runner(checkpoint, CONFIG, NoChooser()))
    found, *_ = on_ranks(
        size, lambda link: logits_of(Runner(checkpoint, CONFIG, NoChooser(), link=link))
    )

    scale = expected[expected.isfinite()].abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "form, most",
    # inputs in an order of their own: a rank widens its part of them
    [("packed-4-asymmetric", 0.6), ("gptq-asymmetric", 1.0)],
)
def test_ranks_keep_their_share_of_codes(tmp_path, monkeypatch, form, most):
    save_quantized(tmp_path, form)
    checkpoint, config = Checkpoint.open(tmp_path), replace(CONFIG, dtype="auto")
    monkeypatch.setattr(programs, "choose_dtype", lambda *_: torch.float32)

    def run(link=NO_OTHERS):
        runner = Runner(checkpoint, config, NoChooser(), link=link)
        return runner.info.weight_bytes, logits_of(runner)

    whole, expected = run()
    (part, found), *_ = on_ranks(2, run)

    assert part < most * whole
    scale = expected[expected.isfinite()].abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=1e-5, atol=1e-5)


def test_a_rank_holds_little_more_than_its_part(make_checkpoint):
    sizes = {"n_embd": 64, "n_inner": 256, "n_layer": 6, "n_head": 4, "n_positions": 64}
    checkpoint = Checkpoint.open(make_checkpoint("GPT2LMHeadModel", **sizes))

    def weight_bytes(link):
        return Runner(checkpoint, CONFIG, NoChooser(), link=link).info.weight_bytes

    whole = Runner(checkpoint, CONFIG, NoChooser()).info.weight_bytes
    for part in on_ranks(2, weight_bytes):
        assert part <= 1.1 / 2 * whole


@pytest.mark.parametrize(
    "kind, fields, size, message",
    [
        ("BertModel", HEADS, 3, "this model has 4 query heads and 4 key heads"),
        ("LlamaForCausalLM", {}, 3, "6 query heads and 2 key heads: allowed .* multiples of it"),
        ("BertModel", {**HEADS, "intermediate_size": 42}, 4, "42 features to divide"),
        (
            "ModernBertModel",
            {},
            2,
            "a ModernBertModel runs in one process; allowed are most classes of ",
        ),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(make_checkpoint, kind, fields, size, message):
    checkpoint = Checkpoint.open(make_checkpoint(kind, **fields))

    with pytest.raises(ConfigError, match=f"tensor_parallel is {size}; .*{message}"):
        load(checkpoint, Rank(0, size))


def test_a_task_that_needs_all_tokens_is_refused(make_checkpoint):
    checkpoint = Checkpoint.open(make_checkpoint("BertForMaskedLM", **HEADS))
    config = EngineConfig(device="cpu", dtype="fp32", task="fill_mask", warmup_seconds=0)

    with pytest.raises(ConfigError, match='for the task "fill_mask": 1'):
        on_ranks(2, lambda link: Runner(checkpoint, config, link=link))


def test_every_family_but_seven_is_divided():
    undivided = {name for name, family in FAMILIES.items() if not family.is_divisible}

    assert undivided == {
        "modernbert",
        "deberta",
        "deberta-v2",
        "phi3",
        "olmo2",
        "olmo3",
        "t5gemma",
    }
