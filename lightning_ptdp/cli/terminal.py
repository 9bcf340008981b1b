"""Writes what people read: text and tables on standard output."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 200  # a file or a pipe has no width of its own


def say(text: str, *, error: bool = False) -> None:
    """Write text as it is, without markup or wrapping; to standard error if it is one."""
    stream = sys.stderr if error else sys.stdout
    stream.write(text + "\n")
    stream.flush()


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Draw a table; columns after the first are right-aligned if they hold numbers only."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        is_number = number > 0 and all(row[number].replace(",", "").replace(".", "").isdigit() for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    is_terminal = sys.stdout.isatty()
    Console(file=sys.stdout, width=None if is_terminal else _FILE_WIDTH).print(table)
