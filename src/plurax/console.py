"""A console of Rich for text that may be anybody's."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from plurax.terminal import printable


class PlainConsole(Console):
    """Shows strings as they are: no markup, no emoji, no escape sequences.

    Styles are those of objects of Rich, such as `Text` and `Table`.
    """

    def __init__(self, **options: Any) -> None:
        plain = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
        super().__init__(**{**plain, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the parts of what is shown."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
