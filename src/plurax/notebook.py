"""Small HTML tables: what a notebook shows of a plan, a program or a result (`_repr_html_`)."""

import html
import sys
from collections.abc import Iterable, Sequence


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a title; every text is escaped, and numbers are on the right.

    >>> html_table("sizes", ["name", "bytes"], [["a<b", 12]]).count("&lt;")
    1
    """
    head = "".join(_cell("th", column) for column in columns)
    body = "".join(
        "<tr>" + "".join(_cell("td", value) for value in row) + "</tr>\n" for row in rows
    )
    return (
        f'<table>\n<caption style="text-align:left">{html.escape(title)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
    )


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, and not IPython in a terminal."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _cell(tag: str, value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    side = "right" if number else "left"
    return f'<{tag} style="text-align:{side};padding:0 .5em">{html.escape(text)}</{tag}>'


def text_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return names and texts in two columns below a title.

    >>> print(text_table("a plan", [("a step", "1 ms"), ("memory", "2 GiB")]))
    a plan
      a step  1 ms
      memory  2 GiB
    """
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join([title, *(f"  {name:{width}}{text}" for name, text in rows)])
