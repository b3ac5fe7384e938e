"""The in-process `Encoder`: inputs, threads, cache, errors and lazy import of torch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.errors import CheckpointError, ConfigError, EngineError, RequestError

from .refusals import refused_request, refused_setting

TEXTS = ["the cat", "river", "a b c d e f", "is it?", "the the the"]


@pytest.fixture(scope="module")
def encoder(small_bert):
    with Encoder.from_pretrained(small_bert, dtype="fp32") as encoder:
        yield encoder


@pytest.fixture(scope="module")
def roundings(small_bert):
    return encoder_roundings(small_bert)


def random_rows(rng, count):
    return [rng.integers(0, 60, rng.integers(1, 60)).tolist() for _ in range(count)]


def test_embeds_texts_in_order(encoder, roundings):
    vectors = encoder.embed(TEXTS)

    assert vectors.shape == (5, 24)
    assert vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert_close(encoder.embed([text])[0], vector, roundings=roundings)


def test_ids_give_what_their_text_gives(encoder):
    np.testing.assert_array_equal(encoder.embed(["the cat"]), encoder.embed([[2, 5, 6, 3]]))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8], ids=lambda dtype: dtype.__name__)
def test_takes_arrays_of_any_integers(encoder, dtype):
    rows = np.array([[2, 5, 6, 3], [2, 6, 5, 3]], dtype=dtype)

    np.testing.assert_array_equal(encoder.embed(rows), encoder.embed(rows.tolist()))


def test_a_row_of_ids_may_be_a_tuple(encoder):
    np.testing.assert_array_equal(encoder.embed([(2, 5, 6, 3)]), encoder.embed([[2, 5, 6, 3]]))


def test_normalize_divides_by_the_length(encoder, roundings):
    plain, normalized = encoder.embed(TEXTS), encoder.embed(TEXTS, normalize=True)

    expected = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    assert_close(normalized, expected, roundings=roundings)


def test_blank_texts_have_the_vector_of_the_special_tokens(encoder, roundings):
    [cls, sep] = encoder._service.intake.texts([""], truncate=False)[0].token_ids.tolist()

    vectors = encoder.embed(["", " ", "\n", "\u3000", "\u00a0", "\0"])

    assert_close(vectors, encoder.embed([[cls, sep]] * 6), roundings=roundings)


def test_texts_are_cut_to_any_number_of_tokens(encoder, roundings):
    long = ["the cat river " * 50]

    cut = encoder.embed(long, truncate_prompt_tokens=4)

    assert_close(cut, encoder.embed(["the cat"]), roundings=roundings)


def test_any_batch_budget_gives_the_same(small_bert, encoder, rng, roundings):
    rows = random_rows(rng, 40)
    expected = encoder.embed(rows)

    # sequences that are longer than a batch of several run by themselves
    for budget in (8, 64, 100, 1000):
        with Encoder.from_pretrained(small_bert, dtype="fp32", max_batch_tokens=budget) as other:
            assert_close(other.embed(rows), expected, roundings=roundings)


def test_any_order_gives_the_same(encoder, rng, roundings):
    rows = random_rows(rng, 40)
    order = rng.permutation(40)

    shuffled = encoder.embed([rows[i] for i in order])

    assert_close(shuffled, encoder.embed(rows)[order], roundings=roundings)


def test_many_threads_share_one_encoder(encoder, rng, roundings):
    asked = [random_rows(rng, int(count)) for count in rng.integers(1, 12, 60)]
    expected = [encoder.embed(rows) for rows in asked]
    bad = [[[5], [99]], [[]], [[5] * 65]]

    def ask(index):
        if index % 7 == 0:
            with pytest.raises(RequestError):
                encoder.embed(bad[index % 3])
        return encoder.embed(asked[index])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(len(asked))))

    for actual, wanted in zip(answers, expected, strict=True):
        assert_close(actual, wanted, roundings=roundings)


def test_threads_may_cut_and_refuse_at_once(encoder, roundings):
    long = "a " * 100

    def ask(index):
        if index % 2:
            return encoder.embed([long], truncate=True)[0]
        with pytest.raises(RequestError, match="102 tokens"):
            encoder.embed([long])
        return None

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for answer in pool.map(ask, range(60)) if answer is not None]

    assert_close(answers, [answers[0]] * len(answers), roundings=roundings)


def test_a_cache_gives_every_bit_again_and_the_arrays_are_the_caller_s(make_checkpoint):
    folder = make_checkpoint()
    settings = {"task": "hidden", "dtype": "fp32", "response_cache_bytes": 10**6}
    with Encoder.from_pretrained(folder, **settings) as encoder:
        first = encoder.hidden([*TEXTS, TEXTS[0]])
        second = encoder.hidden(TEXTS[::-1])
        snapshot = encoder._service.snapshot()
        for array in second:
            array.fill(9.0)
        third = encoder.hidden(TEXTS)

    for array, again in zip(first, third, strict=False):
        np.testing.assert_array_equal(array, again)
    np.testing.assert_array_equal(first[-1], first[0])
    assert snapshot["varlen_response_cache_misses_total"] == len(TEXTS)
    assert snapshot["varlen_response_cache_joined_total"] == 1
    assert snapshot["varlen_response_cache_hits_total"] == len(TEXTS)
    assert 0 < snapshot["varlen_response_cache_bytes"] <= 10**6


def test_without_a_setting_nothing_is_kept(encoder):
    encoder.embed(TEXTS)
    encoder.embed(TEXTS)

    snapshot = encoder._service.snapshot()
    assert not any(value for name, value in snapshot.items() if "response_cache" in name)


def test_many_threads_with_a_cache_get_what_they_asked_for(small_bert, encoder, rng, roundings):
    rows = random_rows(rng, 30)
    expected = encoder.embed(rows)
    plans = [rng.integers(0, len(rows), rng.integers(1, 9)) for _ in range(200)]
    # room for a third of them, so hits, joins, runs and evictions all happen
    with Encoder.from_pretrained(small_bert, dtype="fp32", response_cache_bytes=6000) as cached:

        def work(plan):
            return cached.embed([rows[index] for index in plan])

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(work, plans))
        snapshot = cached._service.snapshot()

    for plan, answer in zip(plans, answers, strict=True):
        assert_close(answer, expected[plan], roundings=roundings)
    assert snapshot["varlen_response_cache_evictions_total"] > 0
    assert snapshot["varlen_response_cache_bytes"] <= 6000
    came = ("hits", "joined", "misses")
    assert sum(snapshot[f"varlen_response_cache_{name}_total"] for name in came) == sum(
        map(len, plans)
    )


def test_refuses_a_bare_string(encoder):
    with refused_request("inputs is one string; send a list of them"):
        encoder.embed("the cat")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        ["cat", [2, 3]],
        [[2, 5.5, 3]],
        [[2, "cat"]],
        [[2**70]],
        [[2, None]],
        [[[2, 5], [5, 3]]],
        [[2], 3],
        [["cat"]],
    ],
    ids=str,
)
def test_refuses_rows_that_are_neither_texts_nor_whole_numbers(encoder, rows):
    with pytest.raises(RequestError):
        encoder.embed(rows)


def test_a_bad_row_fails_alone(encoder):
    good = threading.Barrier(2)

    def bad():
        good.wait()
        with pytest.raises(RequestError):
            encoder.embed([[5], [[5, 6], [7, 8]]])

    thread = threading.Thread(target=bad)
    thread.start()
    good.wait()
    assert encoder.embed(TEXTS).shape == (5, 24)
    thread.join()


@pytest.mark.parametrize("method", ["classify", "hidden", "token_classify"])
def test_refuses_another_task_s_method(encoder, method):
    with refused_setting(f'this encoder was loaded for the task "embed", not {method}'):
        getattr(encoder, method)(TEXTS)


def test_closing_stops_the_engine_s_thread(small_bert):
    before = set(threading.enumerate())
    encoder = Encoder.from_pretrained(small_bert)
    assert set(threading.enumerate()) > before

    encoder.close()

    assert set(threading.enumerate()) == before
    with pytest.raises(EngineError):
        encoder.embed(TEXTS)
    # again does nothing
    encoder.close()


def test_closing_waits_for_what_runs(small_bert, rng, roundings):
    rows = random_rows(rng, 400)
    encoder = Encoder.from_pretrained(small_bert, dtype="fp32", max_batch_tokens=64)
    expected = encoder.embed(rows)
    started = threading.Event()
    answers = []

    def ask():
        started.set()
        try:
            answers.append(encoder.embed(rows))
        except EngineError:
            answers.append(None)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    closer = threading.Thread(target=encoder.close, daemon=True)
    closer.start()
    for thread in [closer, *threads]:
        thread.join(30)
        assert not thread.is_alive()

    assert len(answers) == 4
    for answer in answers:
        if answer is not None:
            assert_close(answer, expected, roundings=roundings)


def test_refuses_what_it_cannot_load(small_bert, tmp_path):
    with pytest.raises(ConfigError):
        Encoder.from_pretrained(small_bert, dtype="int4")
    with pytest.raises(CheckpointError):
        Encoder.from_pretrained(tmp_path)
    writer = save_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel")
    with refused_setting('task is "generate", whose answers are written token by token'):
        Encoder.from_pretrained(writer, device="cpu")


def test_a_shorter_limit_is_kept(small_bert):
    with Encoder.from_pretrained(small_bert, max_sequence_tokens=5) as encoder:
        assert encoder.embed(["a b c"]).shape == (1, 24)
        with pytest.raises(RequestError, match="at most 5"):
            encoder.embed(["a b c d"])
        np.testing.assert_array_equal(
            encoder.embed(["a b c d"], truncate=True), encoder.embed(["a b c"])
        )


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_that_leaves_no_room_for_words_is_survived(small_bert, limit):
    with Encoder.from_pretrained(small_bert, max_sequence_tokens=limit) as encoder:
        assert encoder.embed([[5] * limit]).shape == (1, 24)
        with pytest.raises(RequestError, match=f"at most {limit}"):
            encoder.embed(["a b"])


@pytest.mark.parametrize("name", ["treads", "max_running_sequences"])
def test_refuses_a_setting_that_is_not_its_own(small_bert, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        Encoder.from_pretrained(small_bert, **{name: 1})


def test_whole_numbers_of_numpy_are_whole_numbers(encoder):
    assert encoder.embed(TEXTS, dimensions=np.int64(8)).shape == (5, 8)
