"""The command `varlen clean`: lists or removes shared memory that no process uses."""

from typing import Annotated

import typer

from varlen_tools.scratch import described, remove_unused, unused_regions


def main(
    *,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the regions; default: only list them.")
    ] = False,
) -> None:
    """List or remove shared memory that ended servers left.

    Regions that any process uses are left out.
    """
    regions = remove_unused() if remove else unused_regions()
    for region in regions:
        typer.echo(f"{region.size:>12,}  {region.path}")
    typer.echo(described(regions) + (" removed" if remove else ""))


if __name__ == "__main__":
    typer.run(main)
