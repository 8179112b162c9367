"""The command line."""

from pdhandoff.cli.main import main

__all__ = ["main"]
