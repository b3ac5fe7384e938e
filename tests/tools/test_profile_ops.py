"""The profile runs what is served and accounts for all of its time."""

import time
from types import SimpleNamespace

import pytest

from tests.checkpoints import save_checkpoint
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.profile_ops.__main__ import main
from varlen_bench.profile_ops.models import profile_batches, profile_steps, random_batches
from varlen_bench.profile_ops.timed import CLASSES, REST, Breakdown, TimedKernels, measure

from .commands import run_module

pytestmark = pytest.mark.full

CPU = EngineConfig.from_parameters({"device": "cpu", "kv_bytes": "1048576"})


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A checkpoint folder of a small GPT-2."""
    return save_checkpoint(tmp_path_factory.mktemp("models") / "decoder", "GPT2LMHeadModel")


def test_batches_hold_every_sequence_within_the_budget():
    lengths = [7, 3, 9, 1, 9]

    batches = random_batches(lengths, max_batch_tokens=10, vocab_size=50)

    assert [[sequence.num_tokens for sequence in batch] for batch in batches] == [
        [1, 3],
        [7],
        [9],
        [9],
    ]
    assert all(s.token_ids.min() >= 0 and s.token_ids.max() < 50 for b in batches for s in b)


def test_a_kernel_is_called_with_what_it_was_given_and_counted():
    kernels = TimedKernels(SimpleNamespace(add=lambda x, *, y: x + y))

    assert kernels.add(1, y=2) == 3
    assert kernels.add(3, y=4) == 7

    assert kernels.calls == {"add": 2}
    assert kernels.seconds["add"] >= 0


def test_time_outside_of_ops_is_the_rest_and_the_first_round_does_not_count():
    kernels = TimedKernels(SimpleNamespace(linear=lambda: time.sleep(0.01)))
    rounds = 3

    def run():
        kernels.linear()
        time.sleep(0.03)

    found = measure("sleep", [run, run], kernels, tokens=10, rounds=rounds)

    assert found.calls == {"linear": 2 * rounds}
    assert found.seconds["linear"] >= 2 * rounds * 0.01
    assert found.seconds[REST] >= 2 * rounds * 0.03
    total = sum(found.seconds.values())
    assert found.tokens_per_second == pytest.approx(rounds * 10 / total)


def test_shares_of_classes_add_up_and_an_op_without_a_class_is_another_op():
    seconds = {"linear": 2.0, "linear_packed": 1.0, "append_kv": 3.0, "new_op": 2.0, REST: 2.0}

    shares = Breakdown("step", {}, seconds, 1.0).class_shares()

    assert tuple(shares) == CLASSES
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["matrix products"] == pytest.approx(0.3)
    assert shares["KV cache"] == pytest.approx(0.3)
    assert shares["other ops"] == pytest.approx(0.2)


def test_a_decoders_steps_are_profiled_with_every_op_and_the_choice_of_tokens(decoder):
    found = profile_steps(Checkpoint.open(decoder), CPU, running=[1, 3], context=5, rounds=2)

    assert [one.title for one in found] == [
        "prefill, 1 x 5 tokens",
        "decode, 1 at 5 tokens",
        "prefill, 3 x 5 tokens",
        "decode, 3 at 5 tokens",
    ]
    for one in found:
        assert one.calls["choose"] == 2
        assert one.calls["append_kv"] == one.calls["attention_paged"]
        shares = one.class_shares()
        assert sum(shares.values()) == pytest.approx(1)
        for name in ("matrix products", "attention", "KV cache", "beams and sampling", REST):
            assert shares[name] > 0, name


@pytest.mark.parametrize(
    "running, context, message",
    [
        ([1], 10_000, "a context of 10000 tokens leaves no room"),
        ([4, 500], 60, r"kv_bytes allows \d+ blocks; 500 sequences at 60 tokens need 500"),
    ],
    ids=["context", "blocks"],
)
def test_steps_that_do_not_fit_are_refused(decoder, running, context, message):
    with pytest.raises(ConfigError, match=message):
        profile_steps(Checkpoint.open(decoder), CPU, running, context=context, rounds=1)


def test_an_encoder_and_its_decoder_are_profiled_step_by_step(tmp_path):
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path / "both", "BartForConditionalGeneration"))

    first, decode = profile_steps(checkpoint, CPU, running=[2], context=5, beams=3, rounds=4)

    assert first.title == "encode, 2 x 5 tokens"
    assert decode.title == "decode, 2 at 5 tokens, 3 beams"
    # the same step each time, however often it runs
    assert decode.calls["choose"] == 4
    assert first.calls["attention_varlen"] > 0
    assert "attention_varlen" not in decode.calls
    # keys and values of the sources are stored once
    assert first.calls["append_kv"] > decode.calls["append_kv"] > 0
    assert first.tokens_per_second > 0


def test_an_encoders_batches_are_profiled(tmp_path):
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path / "encoder"))

    found = profile_batches(checkpoint, CPU, [3, 4, 9], rounds=2)

    assert found.title == "encode, 3 sequences"
    shares = found.class_shares()
    assert shares["matrix products"] > 0
    assert shares["beams and sampling"] == 0
    assert all(seconds >= 0 for seconds in found.seconds.values())


def test_the_command_prints_the_classes_and_draws_them(decoder, tmp_path):
    page, picture = tmp_path / "ops.html", tmp_path / "ops.svg"
    outputs = ["--output", page, "--output", picture]

    arguments = [decoder, "--running", "2", "--context", "4", "--rounds", "1"]
    result = run_module(main, *arguments, *outputs)

    assert result.exit_code == 0, result.output
    assert "decode, 2 at 4 tokens" in result.output
    for name in ("matrix products", "KV cache", "beams and sampling", REST):
        assert name in result.output
        assert name in page.read_text()
        assert name in picture.read_text()
    assert (tmp_path / "ops-dark.svg").exists()


def test_lengths_that_the_model_does_not_have_are_refused(tmp_path):
    folder = save_checkpoint(tmp_path / "encoder")

    result = run_module(main, folder, "--shortest", "5000")

    assert result.exit_code == 2
    assert "5000; the longest is" in result.output
