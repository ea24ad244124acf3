"""Tables of the sub-commands: sections of aligned lines, whose last column alone is wrapped."""

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

Lines = Sequence[Sequence[str | Text]]


def sections_table(sections: Mapping[str, Lines], widths: Sequence[int]) -> Group:
    """Each section's title and its lines, whose cells are shown as they are, without markup.

    Args:
        sections: Lines by title.
        widths: Least width of each column but the last, so that the sections stand in line.
    """
    return Group(*(part for title, lines in sections.items() for part in (_title(title), _table(lines, widths))))


def _title(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _table(lines: Lines, widths: Sequence[int]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for width in widths:
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(ratio=1, overflow="fold")
    for first, *others in lines:
        table.add_row(Text("  ").append(first), *(Text("").append(cell) for cell in others))
    return table
