"""The command `ptdp`, whose subcommands are in the files of this folder."""

from .main import main

__all__ = ["main"]
