"""The wheels that users install hold their packages and nothing else."""

import random
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from tests.ci.scripts import PROJECT, load_script
from varlen_kernels.cpu.calls import machine_code
from varlen_kernels.cpu.native.target_cpu import LEVELS
from varlen_kernels.functions import ENTRIES

pytestmark = pytest.mark.full

check_wheel = load_script("check_wheel")
build_wheel, problems = check_wheel.build_wheel, check_wheel.problems
BACKEND, CLIENT = check_wheel.BACKEND, check_wheel.CLIENT

METADATA = "varlen-0.1.0.dist-info/METADATA"


@pytest.mark.parametrize("name", ["BACKEND", "CLIENT"])
def test_the_projects_own_wheels_are_clean(name, tmp_path):
    expected = getattr(check_wheel, name)
    wheel = build_wheel(expected.project, tmp_path)

    assert problems(wheel, expected, check_wheel.source_files(expected)) == []


def test_the_client_needs_neither_torch_nor_the_backend(tmp_path):
    wheel = write_wheel(tmp_path, expected=CLIENT, requires="torch>=2.6")

    assert problems(wheel, CLIENT, []) == ["depends on torch>=2.6"]


@pytest.mark.parametrize(
    "extra",
    [
        "tests/test_it.py",
        "varlen/tests/test_it.py",
        "varlen/model.safetensors",
        "varlen/tuning.json",
        "varlen_bench/rows.py",
        "varlen_client/sync.py",
        "varlen_tools/tritonserver",
        "varlen_tools/libtriton_python.so",
        "varlen_tools/attend.o",
        "kernels/__init__.py",
    ],
)
def test_what_does_not_belong_is_named(extra, tmp_path):
    wheel = write_wheel(tmp_path, extra=[extra])

    assert problems(wheel, BACKEND, []) == [f"holds {extra}"]


def test_compiled_ops_are_a_part_of_the_wheel(tmp_path):
    project, name = tmp_path / "project", "varlen_kernels/cpu/code/attend-avx2-hash.o"
    for file in (".gitignore", "pyproject.toml", "README.md", "LICENSE"):
        (project / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(PROJECT / file, project / file)
    for folder in BACKEND.packages.values():
        shutil.copytree(
            PROJECT / folder, project / folder, ignore=lambda *_: ["code", "__pycache__"]
        )
    code = project / "kernels" / name
    code.parent.mkdir()
    code.write_bytes(random.randbytes(2_000_000))
    code.with_suffix(".lock").touch()

    wheel = build_wheel(project, tmp_path)

    assert problems(wheel, BACKEND, [*check_wheel.source_files(BACKEND), name]) == []


def code_files(level: str) -> list[str]:
    return [f"{op}-{level}-{machine_code.code_hash()}.o" for op in ENTRIES]


def write_wheel_with_code(folder: Path, files: Sequence[str]) -> Path:
    return write_wheel(folder, extra=[f"varlen_kernels/cpu/code/{name}" for name in files])


def test_a_wheel_has_every_op_of_a_level_or_none_and_no_code_of_other_sources(tmp_path):
    files = code_files("avx2")
    of_others = f"attend-avx512-{'0' * 32}.o"

    wheel = write_wheel_with_code(tmp_path, [*files[1:], of_others])

    assert check_wheel.code_problems(wheel) == [
        f"lacks {files[0]}",
        f"holds {of_others}, of other sources",
    ]
    with pytest.raises(SystemExit) as ended:
        check_wheel.main([str(wheel)])
    assert ended.value.code == 1
    assert check_wheel.code_problems(write_wheel_with_code(tmp_path, files)) == []


@pytest.mark.parametrize("machine, accepted", [("x86_64", False), ("aarch64", True)])
def test_a_wheel_without_compiled_ops_is_refused_where_they_can_be_compiled(
    machine, accepted, tmp_path, monkeypatch
):
    monkeypatch.setattr(check_wheel, "machine", lambda: machine)

    found = check_wheel.code_problems(write_wheel(tmp_path))

    assert (found == []) is accepted
    assert all("has no compiled op; make wheels LEVELS=avx2" in line for line in found)


def test_the_wheel_of_a_release_has_every_level(tmp_path, capsys):
    first, *others = [each.level for each in LEVELS]
    wheel = write_wheel_with_code(
        tmp_path, [name for level in others for name in code_files(level)]
    )

    with pytest.raises(SystemExit):
        check_wheel.main(["--all-levels", str(wheel)])

    printed = capsys.readouterr().err
    assert [name for name in code_files(first) if f"lacks {name}" not in printed] == []
    assert not any(name in printed for name in code_files(others[0]))
    of_all = [name for each in LEVELS for name in code_files(each.level)]
    assert check_wheel.code_problems(write_wheel_with_code(tmp_path, of_all), all_levels=True) == []


def test_what_is_missing_is_named(tmp_path):
    wheel = write_wheel(tmp_path, without=["varlen/py.typed", "varlen_kernels/tuning.json"])

    assert problems(wheel, BACKEND, ["varlen/scheduling/engine.py"]) == [
        "lacks varlen/scheduling/engine.py",
        "lacks varlen/py.typed",
        "lacks varlen_kernels/tuning.json",
    ]


def test_a_dependency_on_a_development_wheel_is_named(tmp_path):
    wheel = write_wheel(tmp_path, requires="nvidia-pytriton==0.7.0")

    assert problems(wheel, BACKEND, []) == ["depends on nvidia-pytriton==0.7.0"]


def test_a_project_that_cannot_be_built_is_an_error(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")

    with pytest.raises(RuntimeError, match="the wheel cannot be built"):
        build_wheel(tmp_path, tmp_path / "dist")


def test_the_command_ends_with_success(capsys):
    with pytest.raises(SystemExit) as ended:
        check_wheel.main()

    assert ended.value.code == 0
    assert capsys.readouterr().out.count("and nothing else") == 2


def write_wheel(
    folder: Path,
    *,
    expected: Any = BACKEND,
    extra: Sequence[str] = (),
    without: Sequence[str] = (),
    requires: str = "numpy",
) -> Path:
    wheel = folder / "varlen.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(METADATA, f"Metadata-Version: 2.4\nRequires-Dist: {requires}\n")
        for name in [
            *(f"{package}/py.typed" for package in expected.packages),
            *expected.data_files,
            *extra,
        ]:
            if name not in without:
                archive.writestr(name, "")
    return wheel
