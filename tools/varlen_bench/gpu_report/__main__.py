"""Command line of the GPU report, which `make gpu-report` runs."""

import signal
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from varlen_bench.gpu_report.bounded import Outcome, run_stages
from varlen_bench.gpu_report.served_models import DeviceType
from varlen_bench.gpu_report.stages import BUNDLE, Call, Files, all_stages
from varlen_bench.gpu_report.summary import is_wrong, summary
from varlen_bench.harness.command import Only, Revision, refused, select
from varlen_bench.kernels.machine import finds_gpu

# A machine may be lent for calls of ten minutes. The rest is for its start and for the archive.
SECONDS = 585
SUMMARY = "summary.md"
ARCHIVE = "report.tar.gz"

app = typer.Typer(add_completion=False)


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a folder, without its folders, into an archive that is replaced."""
    partial = archive.with_name(f"{archive.name}.part")
    with tarfile.open(partial, "w:gz") as files:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                files.add(path, path.name)
    partial.replace(archive)


def unpack(archive: Path, folder: Path) -> None:
    """Restore the files of an earlier run, if there is an archive.

    Raises:
        ValueError: the file is no archive of a report.
    """
    if not archive.is_file():
        return
    try:
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive} is no archive of a report; remove it") from error


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("gpu-report"),
    seconds: Annotated[float, typer.Option(min=20, help="For all stages together.")] = SECONDS,
    call: Annotated[Call, typer.Option(help="The stages that run.")] = Call.FIGURES,
    only: Only = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run without a GPU: each stage says that it finds none."),
    ] = False,
    device: Annotated[
        DeviceType, typer.Option(help="cpu: rehearse --call server with small shapes.")
    ] = "cuda",
    bundle: Annotated[
        Path, typer.Option(help="The server, if this Python's environment has none.")
    ] = BUNDLE,
    revision: Revision = "",
) -> None:
    """Test, measure and tune on this GPU; fail if a result is wrong."""
    # with --only, stages of all calls; the summary reads earlier files of the report, too
    with TemporaryDirectory(prefix="varlen-report-") as scratch:
        files = Files(Path(scratch), revision, device, bundle)
        calls = all_stages(files)
        known = {stage.name: stage for stages in calls.values() for stage in stages}
        with refused():
            names = select(only, known) if only else [stage.name for stage in calls[call]]
        if device != "cpu" and not finds_gpu("gpu-report") and not dry_run:
            return
        with refused():
            unpack(output / ARCHIVE, files.folder)
        output.mkdir(parents=True, exist_ok=True)
        # a stage must end with this process
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

        def save(outcomes: list[Outcome]) -> None:
            text = summary(files, outcomes)
            for folder in (files.folder, output):
                (folder / SUMMARY).write_text(text, encoding="utf-8")
            pack(files.folder, output / ARCHIVE)
            last = outcomes[-1]
            print(f"{last.stage.name}: {last.status} {last.seconds:.0f} s {last.note}", flush=True)

        outcomes = run_stages([known[name] for name in names], seconds, files.folder, save)
        print((output / SUMMARY).read_text(encoding="utf-8"))
        if is_wrong(files, outcomes):
            print(f"gpu-report: results are wrong or incomplete, see {output / SUMMARY}")
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
