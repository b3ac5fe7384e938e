"""The archive of a report: all files of its stages, never half written."""

import tarfile
from pathlib import Path


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a folder into an archive, which replaces an earlier one."""
    partial = archive.with_name(f"{archive.name}.part")
    with tarfile.open(partial, "w:gz") as files:
        for path in sorted(folder.iterdir()):
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
