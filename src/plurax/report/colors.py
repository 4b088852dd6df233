"""Colours of pictures, and what tells lines and areas apart beside them."""

from typing import Any

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, BLACK = "#56b4e9", "#d55e00", "#000000"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, BLACK)
"""Colours that readers who see few colours tell apart (M. Okabe and K. Ito 2008)."""
YELLOW = "#f0e442"
"""Of the same eight, for areas alone: a line of it is not seen on white."""
PAPER, LIGHT, GREY = "#ececec", "#d4d4d4", "#777777"
"""What is empty, what is behind, and what is said beside."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "////", "....", "xxxx")
"""Beside colours, so that a picture reads without them."""


def line_style(index: int) -> dict[str, Any]:
    """Return the colour, the marker and the dashes of the line of an index; colours repeat."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def lighter(color: str, share: float) -> str:
    """Return a colour of which a share, 0 to 1, is white: behind text, or a relative of another."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
