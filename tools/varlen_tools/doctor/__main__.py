"""`python -m varlen_tools.doctor FOLDER` is `varlen doctor FOLDER`."""

import typer

from varlen_tools.doctor.command import doctor

if __name__ == "__main__":
    typer.run(doctor)
