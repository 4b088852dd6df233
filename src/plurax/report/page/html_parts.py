"""Pieces of HTML, in which every text is escaped."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Cell(NamedTuple):
    """A cell of a table: its text, the value by which it is sorted, and its class."""

    text: str
    key: float | str | None = None
    mark: str = ""


def escape(value: object) -> str:
    """Return a value as text that HTML shows as it is, in an attribute too."""
    return html.escape(str(value), quote=True)


def table(
    caption: str,
    columns: Sequence[str | Cell],
    rows: Iterable[Sequence[Cell | str | float | None]],
    *,
    sortable: bool = False,
    row_names: Sequence[str] = (),
) -> str:
    """Return a table that scrolls by itself where it is wider than the page.

    The first cell of a row is its header. A `sortable` table has a button in each column's header.
    `row_names` are the values of `data-run` of the rows.
    """
    heads = [column if isinstance(column, Cell) else Cell(column) for column in columns]
    body, filled = [], [[as_cell(value) for value in row] for row in rows]
    for index, row in enumerate(filled):
        named = f' data-run="{escape(row_names[index])}"' if row_names else ""
        cells = [_cell(cell, header=place == 0) for place, cell in enumerate(row)]
        body.append(f"<tr{named}>{''.join(cells)}</tr>")
    # The heading of numbers is on the right, as they are.
    numbers = [any("number" in row[place].mark for row in filled) for place in range(len(heads))]
    head = "".join(_head(cell, n, sortable) for cell, n in zip(heads, numbers, strict=True))
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table{kind}><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{chr(10).join(body)}</tbody></table></div>"
    )


def pairs(values: Mapping[str, object]) -> str:
    """Return names and values as a list of definitions."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(number_text(value))}</dd></div>"
        for name, value in values.items()
    )
    return f'<dl class="pairs">{items}</dl>'


def details(summary: str, content: str, *, shown: bool = False) -> str:
    """Return content that is shown when its summary is chosen."""
    state = " open" if shown else ""
    return f"<details{state}><summary>{escape(summary)}</summary>{content}</details>"


def section(name: str, title: str, content: str, note: str = "") -> str:
    """Return a part of the page with a heading; `note` is a sentence below it."""
    paragraph = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{escape(title)}</h2>{paragraph}{content}</section>'
    )


def as_cell(value: Cell | str | float | None) -> Cell:
    """Return a value as a cell: a number on the right, to four digits."""
    if isinstance(value, Cell):
        return value
    if value is None:
        return Cell("–", None, "none")
    if isinstance(value, bool | str):
        return Cell(str(value), str(value))
    return Cell(number_text(value), float(value), "number")


def number_text(value: object) -> str:
    """Return a number to four digits, large ones with commas, anything else as text.

    >>> number_text(0.123456), number_text(1234567), number_text(float("nan")), number_text("a")
    ('0.1235', '1,234,567', 'nan', 'a')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Return a time as people write it.

    >>> duration_text(0.0123), duration_text(12.34), duration_text(3723)
    ('12.3 ms', '12.3 s', '1 h 02 min')
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _head(cell: Cell, number: bool, sortable: bool) -> str:
    marks = f"{cell.mark} number".strip() if number else cell.mark
    mark = f' class="{marks}"' if marks else ""
    note = '<span class="visually-hidden"> (differs)</span>' if "differs" in cell.mark else ""
    text = f"{escape(cell.text)}{note}"
    if sortable and cell.text:
        return f'<th scope="col"{mark} aria-sort="none"><button type="button">{text}</button></th>'
    return f'<th scope="col"{mark}>{text}</th>'


def _cell(cell: Cell, *, header: bool) -> str:
    tag = 'th scope="row"' if header else "td"
    mark = f' class="{cell.mark}"' if cell.mark else ""
    key = "" if cell.key is None else f' data-key="{escape(cell.key)}"'
    return f"<{tag}{mark}{key}>{escape(cell.text)}</{'th' if header else 'td'}>"
