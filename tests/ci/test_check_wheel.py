"""The wheel that users install holds the four packages and nothing else."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ci.scripts import PROJECT, load_script

check_wheel = load_script("check_wheel")
build_wheel, problems = check_wheel.build_wheel, check_wheel.problems

METADATA = "varlen-0.1.0.dist-info/METADATA"


def test_the_projects_own_wheel_is_clean(tmp_path: Path) -> None:
    wheel = build_wheel(PROJECT, tmp_path)

    assert problems(wheel, check_wheel.source_files(PROJECT)) == []


@pytest.mark.parametrize(
    "extra",
    [
        "tests/test_it.py",
        "varlen/tests/test_it.py",
        "varlen/model.safetensors",
        "varlen/tuning.json",
        "varlen_bench/rows.py",
        "varlen_tools/tritonserver",
        "varlen_tools/libtriton_python.so",
        "kernels/__init__.py",
    ],
)
def test_what_does_not_belong_is_named(extra: str, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, extra=[extra])

    assert problems(wheel, []) == [f"holds {extra}"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, without=["varlen/py.typed", "varlen_kernels/tuning.json"])

    assert problems(wheel, ["varlen/scheduling/engine.py"]) == [
        "lacks varlen/scheduling/engine.py",
        "lacks varlen/py.typed",
        "lacks varlen_kernels/tuning.json",
    ]


def test_a_dependency_on_a_development_wheel_is_named(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, requires="nvidia-pytriton==0.7.0")

    assert problems(wheel, []) == ["depends on nvidia-pytriton==0.7.0"]


def test_a_project_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")

    with pytest.raises(RuntimeError, match="the wheel cannot be built"):
        build_wheel(tmp_path, tmp_path / "dist")


def test_the_command_ends_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_wheel.main()

    assert ended.value.code == 0
    assert "holds the four packages and nothing else" in capsys.readouterr().out


def write_wheel(
    folder: Path, *, extra: Sequence[str] = (), without: Sequence[str] = (), requires: str = "numpy"
) -> Path:
    wheel = folder / "varlen.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(METADATA, f"Metadata-Version: 2.4\nRequires-Dist: {requires}\n")
        for name in [
            *(f"{package}/py.typed" for package in check_wheel.PACKAGES),
            *check_wheel.DATA_FILES,
            *extra,
        ]:
            if name not in without:
                archive.writestr(name, "")
    return wheel
