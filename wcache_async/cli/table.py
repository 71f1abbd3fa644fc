"""Tables on standard output: drawn by rich for a terminal, plain aligned text for everything else."""

import sys
from collections.abc import Collection, Sequence

__all__ = ["print_table"]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print `rows` under `columns`; those named in `right` are aligned to the right."""
    if sys.stdout.isatty():
        _print_drawn(columns, rows, right)
    else:
        _print_plain(columns, rows, right)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]) -> None:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _print_drawn(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text, not str: names may hold what rich takes for markup.
        table.add_row(*map(Text, row))
    Console().print(table)
