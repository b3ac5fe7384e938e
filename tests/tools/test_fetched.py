"""`varlen list` and `varlen rm`: only models that `varlen serve` has fetched, and nothing outside of their folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
from rich.filesize import decimal

from varlen_tools.serve.models import SOURCE_FILE, Fetching, fetch_models, find_models

from .commands import run_varlen
from .conftest import save_encoder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Cache folder of this test, below a folder of this user only."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "varlen/models"


def fetched(source: Path, name: str) -> Path:
    """Fetch a checkpoint as `varlen serve` of another process that has ended, and return the model."""
    folder = in_use(source, name)
    # the lock of this process is on the old file
    shutil.copy2(folder / SOURCE_FILE, folder / "copy")
    (folder / "copy").replace(folder / SOURCE_FILE)
    return folder


def in_use(source: Path, name: str) -> Path:
    """Fetch a checkpoint as `varlen serve`, in this process, which uses it from then on."""
    how = Fetching(name, {})
    found = find_models([str(source)], how, report=lambda _: None)
    [folder] = fetch_models(found, how, report=lambda _: None)
    return folder


@pytest.fixture
def checkpoints(tmp_path) -> list[Path]:
    """Two checkpoints."""
    return [save_encoder(tmp_path / name) for name in ("first", "second")]


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_lists_the_last_used_model_first(checkpoints, cache):
    a, b = fetched(checkpoints[0], "a"), fetched(checkpoints[1], "b")
    os.utime(a / SOURCE_FILE, (0, 1_700_000_000))

    table, lines = run_varlen("list"), run_varlen("list", "--json").stdout.splitlines()

    sizes = [disk_bytes(b), disk_bytes(a)]
    assert [json.loads(line)["name"] for line in lines] == ["b", "a"]
    assert [json.loads(line)["bytes"] for line in lines] == sizes
    assert json.loads(lines[1]) == {
        "name": "a",
        "task": "embed",
        "bytes": sizes[1],
        "used": json.loads(lines[1])["used"],
        "source": str(checkpoints[0]),
        "folder": str(a),
    }
    head, first, second = table.stdout.splitlines()
    assert head.split() == ["name", "task", "size", "used", "source"]
    assert first.split()[:2] == ["b", "embed"]
    assert second.endswith(str(checkpoints[0]))
    assert table.stderr == f"2 models, {decimal(sum(sizes))} in {cache}\n"


def test_serving_a_model_again_is_its_last_use(checkpoints):
    folder = fetched(checkpoints[0], "a")
    os.utime(folder / SOURCE_FILE, (0, 1_700_000_000))

    in_use(checkpoints[0], "a")

    assert (folder / SOURCE_FILE).stat().st_mtime > 1_700_000_000


def test_an_empty_cache_says_how_to_fill_it(cache):
    listed = run_varlen("list")

    assert (listed.exit_code, listed.stdout) == (0, "")
    assert listed.stderr == f"{cache} has no models; `varlen serve MODEL` fetches one\n"


def test_removes_a_model_whole_and_says_what_that_frees(checkpoints, cache):
    a, b = fetched(checkpoints[0], "a"), fetched(checkpoints[1], "b")
    freed = disk_bytes(a)

    removed = run_varlen("rm", "a")

    assert removed.exit_code == 0
    assert removed.stderr == f"a is removed: {decimal(freed)} freed\n"
    # the file of the lock stays
    assert sum(path.stat().st_size for path in a.parent.rglob("*")) < 5000
    assert not list(cache.parent.rglob(".fetch-*"))
    assert b.is_dir()
    assert checkpoints[0].is_dir()
    # as if it had never been there
    assert fetched(checkpoints[0], "a") == a


def test_an_unknown_name_removes_nothing_and_says_what_there_is(checkpoints):
    a, b = fetched(checkpoints[0], "a"), fetched(checkpoints[1], "b")

    removed = run_varlen("rm", "a", "c")

    assert removed.exit_code == 2
    assert "no fetched model has the name or source 'c'; there are: b, a" in removed.stderr
    assert a.is_dir()
    assert b.is_dir()


@pytest.mark.parametrize("name", ["..", ".", "../../..", "/", "", "a/1", "*", "lock"])
def test_a_path_is_no_name(checkpoints, cache, name):
    folder = fetched(checkpoints[0], "a")

    assert run_varlen("rm", "--", name).exit_code == 2
    assert folder.is_dir()
    assert cache.is_dir()


def test_models_of_one_name_are_removed_by_their_source(checkpoints):
    one, two = fetched(checkpoints[0], "a"), fetched(checkpoints[1], "a")

    both = run_varlen("rm", "a")
    assert both.exit_code == 2
    assert "a is the name or source of 2 models: a of " in both.stderr

    assert run_varlen("rm", checkpoints[1]).exit_code == 0
    assert (one.is_dir(), two.exists()) == (True, False)


def test_models_of_one_source_are_removed_by_their_name(checkpoints):
    one, two = fetched(checkpoints[0], "a"), fetched(checkpoints[0], "b")

    assert run_varlen("rm", checkpoints[0]).exit_code == 2
    assert run_varlen("rm", "b").exit_code == 0
    assert (one.is_dir(), two.exists()) == (True, False)


def test_the_next_fetch_removes_what_a_killed_removal_leaves(checkpoints, cache, monkeypatch):
    fetched(checkpoints[0], "a")
    # as if the process ended before it deletes the files
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    assert run_varlen("rm", "a").exit_code == 1
    assert list(cache.rglob(".fetch-*"))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))

    fetched(checkpoints[0], "a")

    assert not list(cache.rglob(".fetch-*"))


def test_a_model_in_use_stays(checkpoints):
    folder = in_use(checkpoints[0], "a")

    removed = run_varlen("rm", "a")

    assert removed.exit_code == 1
    assert removed.stderr.startswith(f"error: a is not removed: process {os.getpid()} of user ")
    assert removed.stderr.endswith(" serves it\n")
    assert folder.is_dir()


def test_links_and_folders_of_others_are_neither_listed_nor_removed(checkpoints, cache, tmp_path):
    model = fetched(checkpoints[0], "a")
    outside = tmp_path / "outside"
    model.rename(outside)
    # links to a model, and to the folder of a source; a folder without the file; one with another name
    model.symlink_to(outside)
    (cache / "0123456789ab").symlink_to(model.parent)
    shutil.copytree(outside, cache / "abcdef012345/b")
    (cache / "abcdef012345/b" / SOURCE_FILE).unlink()
    shutil.copytree(outside, cache / "mine/c")

    assert run_varlen("list").stdout == ""
    for name in ("a", "b", "c", str(checkpoints[0])):
        assert run_varlen("rm", name).exit_code == 2
    assert (outside / "config.pbtxt").is_file()
    assert (cache / "abcdef012345/b/config.pbtxt").is_file()
    assert (cache / "mine/c/config.pbtxt").is_file()


def test_a_link_inside_a_model_is_removed_and_not_followed(checkpoints, tmp_path):
    folder = fetched(checkpoints[0], "a")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (folder / "1/link").symlink_to(precious)

    assert run_varlen("rm", "a").exit_code == 0
    assert (precious / "file").read_text() == "kept"
