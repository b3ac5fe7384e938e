"""The installed program `varlen`: the client's commands, and `doctor`, which needs the backend.

The client knows no other package, so what joins them is here.
"""

from varlen_client.cli.main import app
from varlen_tools.doctor.command import doctor

__all__ = ["app", "main"]

app.command()(doctor)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
