"""Shows doctests in docstrings as code: Markdown would take their `>>>` for quotations."""

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts a fence around every doctest of a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Text with a fence around each run of lines that starts with `>>>` and ends at a blank one."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.startswith(">>>"):
            inside = True
            lines.append("```pycon")
        if inside and not line.strip():
            inside = False
            lines.append("```")
        lines.append(line)
    if inside:
        lines.append("```")
    return "\n".join(lines)
