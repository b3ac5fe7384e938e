"""Files of a checkpoint folder that may be links."""

from pathlib import Path


class LinkError(Exception):
    """A link leads out of the checkpoint's folder."""


def resolve_inside(folder: Path, path: Path) -> Path:
    """Return the real path of a file.

    Raises:
        LinkError: the file is a link that leads out of `folder`.
    """
    real = path.resolve()
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        # The hub's own cache: a snapshot is links to blobs two folders up.
        roots.append(roots[0].parents[1] / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise LinkError(f"{path.name} is a link that leads out of the checkpoint's folder")
    return real
