"""The command: `python -m varlen_tools.doctor FOLDER`, the same as `varlen doctor`."""

import typer

from varlen_tools.doctor.command import doctor

if __name__ == "__main__":
    typer.run(doctor)
