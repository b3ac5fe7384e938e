"""A launch comes from the table of this GPU and this Triton, and by rule where the table has none."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from varlen_kernels import tuning

KEY = (768, torch.bfloat16)
BY_RULE = {"ROWS": 4, "num_warps": 4}
TUNED = {"ROWS": 1, "num_warps": 2}
OPTIONS = {"enable_fp_fusion": True}


def candidates(hidden, dtype):
    assert (hidden, dtype) == KEY
    return [BY_RULE, TUNED]


@pytest.fixture(autouse=True)
def forget_what_was_chosen():
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Return a function that puts this process on a GPU of that name, with a table."""

    def put(name, version, launch):
        table = {"Some GPU": {"3.6": {"norm": {"768/bfloat16": launch}}}}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(tuning, "minor_version", lambda: version)
        monkeypatch.setattr(tuning, "_text", lambda: json.dumps(table))

    return put


def test_the_tuned_launch_is_picked(on_a_gpu):
    on_a_gpu("Some GPU", "3.6", TUNED)

    assert tuning.pick("norm", KEY, candidates) == TUNED | OPTIONS


@pytest.mark.parametrize("name, version", [("Another GPU", "3.6"), ("Some GPU", "3.7")])
def test_what_was_measured_elsewhere_is_not_picked(name, version, on_a_gpu):
    on_a_gpu(name, version, TUNED)

    assert tuning.pick("norm", KEY, candidates) == BY_RULE | OPTIONS


def test_a_launch_that_is_no_candidate_any_more_is_not_picked(on_a_gpu):
    on_a_gpu("Some GPU", "3.6", {"ROWS": 64, "num_warps": 2})

    assert tuning.pick("norm", KEY, candidates) == BY_RULE | OPTIONS


def test_an_op_without_an_entry_is_launched_by_rule(on_a_gpu):
    on_a_gpu("Some GPU", "3.6", TUNED)

    assert tuning.pick("softmax", KEY, candidates) == BY_RULE | OPTIONS


def test_without_a_gpu_the_first_candidate_is_picked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert tuning.pick("norm", KEY, candidates) == BY_RULE | OPTIONS


def test_candidates_are_listed_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls = []

    def counted(*key):
        calls.append(key)
        return candidates(*key)

    for _ in range(3):
        tuning.pick("norm", KEY, counted)

    assert calls == [KEY]


def test_a_launch_can_be_forced_for_a_while():
    before = tuning.pick("norm", KEY, candidates)

    with tuning.forced("norm", KEY, {"ROWS": 2}):
        assert tuning.pick("norm", KEY, candidates) == {"ROWS": 2} | OPTIONS
        with tuning.forced("norm", KEY, {"ROWS": 8}):
            assert tuning.pick("norm", KEY, candidates) == {"ROWS": 8} | OPTIONS
        assert tuning.pick("norm", KEY, candidates) == {"ROWS": 2} | OPTIONS

    assert tuning.pick("norm", KEY, candidates) == before


def test_a_forced_launch_leaves_nothing_behind_when_it_fails():
    with pytest.raises(RuntimeError), tuning.forced("norm", KEY, {"ROWS": 2}):
        raise RuntimeError

    assert tuning.pick("norm", KEY, candidates) == BY_RULE | OPTIONS


def test_what_is_asked_for_can_be_watched():
    with tuning.watch() as outer:
        with tuning.watch() as inner:
            tuning.pick("norm", KEY, candidates)
        tuning.pick("norm", KEY, candidates)

    tuning.pick("norm", KEY, candidates)
    assert inner == [("norm", KEY, candidates)]
    assert outer == inner * 2


def test_a_key_is_spelled_in_full():
    assert tuning.spell((768, torch.float16, "erf", True)) == "768/float16/erf/True"


def test_the_table_that_is_shipped_can_be_read():
    tuning.parse_tables(tuning._text())


@pytest.mark.parametrize(
    "table, message",
    [
        ([], r"tuning.json is \[\] in tuning.json; allowed: an object"),
        ({"GPU": 3}, "GPU is 3 in tuning.json"),
        ({"GPU": {"3.6": []}}, r"3.6 is \[\] in tuning.json"),
        ({"GPU": {"3.6": {"norm": 1}}}, "norm is 1 in tuning.json"),
        ({"GPU": {"3.6": {"norm": {"768": 4}}}}, "768 is 4 in tuning.json"),
        ({"GPU": {"3.6": {"norm": {"768": {"ROWS": "4"}}}}}, "GPU/3.6/norm/768 has ROWS = '4'"),
        ({"GPU": {"3.6": {"norm": {"768": {"ROWS": True}}}}}, "ROWS = True; allowed: an integer"),
    ],
)
def test_a_table_that_is_not_one_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        tuning.parse_tables(json.dumps(table))


def test_text_that_is_not_json_is_refused():
    with pytest.raises(ValueError, match="Expecting"):
        tuning.parse_tables("{")
