"""`pick` returns the launch of the tuning table, or the default."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from varlen_kernels import tuning

KEY = (768, torch.bfloat16)
DEFAULT = {"ROWS": 4, "num_warps": 4}
TUNED = {"ROWS": 1, "num_warps": 2}
OPTIONS = {"enable_fp_fusion": True}
INSTALLED_TEXT = tuning._text


def candidate_launches(hidden, dtype):
    assert (hidden, dtype) == KEY
    return [DEFAULT, TUNED]


@pytest.fixture(autouse=True)
def clear_cached_launches():
    tuning.clear()
    yield
    tuning.clear()


@pytest.fixture
def fake_gpu(monkeypatch):
    """Return a function that fakes a GPU, a Triton version and a tuning table."""

    def fake(name, version, launch, capability=(9, 0)):
        other = {"norm": {"768/bfloat16": {"ROWS": 9, "num_warps": 4}}}
        table = {
            "sm_80": {"A GPU": {"3.6": other}},
            "sm_90": {
                "A GPU": {"3.5": other},
                "Some GPU": {"3.6": {"norm": {"768/bfloat16": launch}}},
                "Yet another GPU": {"3.6": other},
            },
        }
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(tuning, "minor_version", lambda: version)
        monkeypatch.setattr(tuning, "_text", lambda: json.dumps(table))

    return fake


def test_the_tuned_launch_is_picked(fake_gpu):
    fake_gpu("Some GPU", "3.6", TUNED)

    assert tuning.pick("norm", KEY, candidate_launches) == TUNED | OPTIONS


def test_each_gpu_of_a_machine_has_its_own_launches(fake_gpu, monkeypatch):
    fake_gpu("Some GPU", "3.6", TUNED)
    names, current = ["Some GPU", "Another kind of GPU"], [0]
    capabilities = [(9, 0), (8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])

    for gpu, expected in ((0, TUNED), (1, DEFAULT), (0, TUNED)):
        current[0] = gpu
        assert tuning.pick("norm", KEY, candidate_launches) == expected | OPTIONS


def test_another_file_replaces_the_installed_table(fake_gpu, monkeypatch, tmp_path):
    fake_gpu("Some GPU", "3.6", TUNED)
    file = tmp_path / "tuning.json"
    file.write_text(tuning._text())
    # the installed file has no launch for this GPU
    monkeypatch.setattr(tuning, "_text", INSTALLED_TEXT)
    monkeypatch.setattr(tuning, "_tables_file", tuning._tables_file)
    assert tuning.pick("norm", KEY, candidate_launches) == DEFAULT | OPTIONS

    tuning.use_tables(file)

    assert tuning.pick("norm", KEY, candidate_launches) == TUNED | OPTIONS
    file.write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        tuning.use_tables(file)


def test_a_gpu_without_a_table_uses_that_of_its_compute_capability(fake_gpu, caplog):
    caplog.set_level("INFO")
    fake_gpu("Unknown GPU", "3.6", TUNED)

    # of two tables the first one by name
    assert tuning.pick("norm", KEY, candidate_launches) == TUNED | OPTIONS
    assert caplog.messages == [
        "no launches were tuned on Unknown GPU; the launches of Some GPU are used"
    ]


@pytest.mark.parametrize(
    "name, version, capability",
    [("Unknown GPU", "3.6", (8, 9)), ("Some GPU", "3.7", (9, 0)), ("Some GPU", "3.6", (8, 9))],
)
def test_launches_of_another_capability_or_triton_version_are_ignored(
    name, version, capability, fake_gpu
):
    fake_gpu(name, version, TUNED, capability)

    assert tuning.pick("norm", KEY, candidate_launches) == DEFAULT | OPTIONS


def test_a_tuned_launch_that_is_no_longer_a_candidate_is_ignored(fake_gpu):
    fake_gpu("Some GPU", "3.6", {"ROWS": 64, "num_warps": 2})

    assert tuning.pick("norm", KEY, candidate_launches) == DEFAULT | OPTIONS


def test_an_op_without_an_entry_gets_the_default(fake_gpu):
    fake_gpu("Some GPU", "3.6", TUNED)

    assert tuning.pick("softmax", KEY, candidate_launches) == DEFAULT | OPTIONS


def test_without_a_gpu_the_default_is_picked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert tuning.pick("norm", KEY, candidate_launches) == DEFAULT | OPTIONS


def test_candidates_are_listed_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls = []

    def counted(*key):
        calls.append(key)
        return candidate_launches(*key)

    for _ in range(3):
        tuning.pick("norm", KEY, counted)

    assert calls == [KEY]


def test_a_launch_can_be_forced_inside_a_context():
    before = tuning.pick("norm", KEY, candidate_launches)

    with tuning.forced_launch("norm", KEY, {"ROWS": 2}):
        assert tuning.pick("norm", KEY, candidate_launches) == {"ROWS": 2} | OPTIONS
        with tuning.forced_launch("norm", KEY, {"ROWS": 8}):
            assert tuning.pick("norm", KEY, candidate_launches) == {"ROWS": 8} | OPTIONS
        assert tuning.pick("norm", KEY, candidate_launches) == {"ROWS": 2} | OPTIONS

    assert tuning.pick("norm", KEY, candidate_launches) == before


def test_an_exception_ends_a_forced_launch():
    with pytest.raises(RuntimeError), tuning.forced_launch("norm", KEY, {"ROWS": 2}):
        raise RuntimeError

    assert tuning.pick("norm", KEY, candidate_launches) == DEFAULT | OPTIONS


def test_record_picks_records_the_calls_of_pick():
    with tuning.record_picks() as outer:
        with tuning.record_picks() as inner:
            tuning.pick("norm", KEY, candidate_launches)
        tuning.pick("norm", KEY, candidate_launches)

    tuning.pick("norm", KEY, candidate_launches)
    assert inner == [("norm", KEY, candidate_launches)]
    assert outer == inner * 2


def test_key_text_joins_all_parts_of_a_key():
    assert tuning.key_text((768, torch.float16, "erf", True)) == "768/float16/erf/True"


def test_the_shipped_table_is_valid():
    assert tuning.parse_tables(tuning._text())


def table_of(launches):
    return {"sm_90": {"GPU": {"3.6": {"norm": launches}}}}


@pytest.mark.parametrize(
    "table, message",
    [
        ([], r"tuning.json is \[\] in tuning.json; allowed: an object"),
        ({"sm_90": 3}, "sm_90 is 3 in tuning.json"),
        ({"sm_90": {"GPU": []}}, r"GPU is \[\] in tuning.json"),
        ({"sm_90": {"GPU": {"3.6": []}}}, r"3.6 is \[\] in tuning.json"),
        (table_of(1), "norm is 1 in tuning.json"),
        (table_of({"768": 4}), "768 is 4 in tuning.json"),
        (table_of({"768": {"ROWS": "4"}}), "sm_90/GPU/3.6/norm/768 has ROWS = '4'"),
        (table_of({"768": {"ROWS": True}}), "ROWS = True; allowed: an integer"),
    ],
)
def test_an_invalid_table_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        tuning.parse_tables(json.dumps(table))


def test_invalid_json_is_refused():
    with pytest.raises(ValueError, match="Expecting"):
        tuning.parse_tables("{")
