"""What is in a picture: panels, their labels, and how much is drawn in each."""

from typing import NamedTuple

import numpy as np


class Panel(NamedTuple):
    """One set of axes.

    **Fields:** `title`, `x`, `y`, the texts beside it; `lines`, of each its label (empty where it
    has none of its own) and its number of points; `shapes`, how many bars and other patches;
    `areas`, how many bands, clouds of points and meshes; `texts`, written inside.
    """

    title: str
    x: str
    y: str
    lines: list[tuple[str, int]]
    shapes: int
    areas: int
    texts: list[str]


def panels(figure):
    """Those of a figure and of its parts that are shown."""
    return [
        Panel(
            axes.get_title() or axes.get_title(loc="left"),
            axes.get_xlabel(),
            axes.get_ylabel(),
            [(_own(line.get_label()), len(np.atleast_1d(line.get_xdata()))) for line in axes.lines],
            len(axes.patches),
            len(axes.collections),
            [text.get_text() for text in axes.texts],
        )
        for axes in figure.axes
        if axes.get_visible()
    ]


def legend(figure):
    """The texts of all legends, those of its parts and panels too."""
    found = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    found += [one for part in getattr(figure, "subfigs", []) for one in part.legends]
    return [text.get_text() for one in found if one is not None for text in one.get_texts()]


def _own(label):
    return "" if label.startswith("_") else label
