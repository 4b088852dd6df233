"""Create Matplotlib figures. Matplotlib is an extra, imported when the first figure is created."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plurax import errors
from plurax.disk import replacing
from plurax.lazy import imported

if TYPE_CHECKING:
    import matplotlib.figure

HANDLE, LETTER = 0.6, 0.075
"""Inches that a line in a legend and a letter beside it take."""


def check_matplotlib() -> None:
    """Raise `MissingPackageError` where Matplotlib is not installed, before expensive work."""
    imported("matplotlib.figure", "Drawing", "matplotlib", "pictures")


def new_figure(
    width: float,
    height: float,
    layout: Literal["constrained", "compressed"] | None = "constrained",
) -> "matplotlib.figure.Figure":
    """Return an empty figure of a size in inches.

    Raises `MissingPackageError` where Matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    class ShownFigure(Figure):  # a notebook shows others only where pyplot is set up
        def _repr_png_(self) -> bytes:
            page = io.BytesIO()
            self.savefig(page, format="png")
            return page.getvalue()

    return ShownFigure(figsize=(width, height), layout=layout, dpi=120)


def tidy(axis: Any) -> None:
    """Draw a faint grid behind what an axis shows, and no frame above and beside it."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def legend_below(figure: "matplotlib.figure.Figure", axis: Any) -> None:
    """Write what the lines of an axis are below a figure; nothing where it has none."""
    handles, labels = axis.get_legend_handles_labels()
    widths, room = [HANDLE + LETTER * len(label) for label in labels], figure.get_figwidth()
    columns = len(labels) if sum(widths) <= room else max(1, int(room / max(widths)))
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def saved(
    figure: "matplotlib.figure.Figure", path: str | Path | None, **options: Any
) -> "matplotlib.figure.Figure":
    """Return the figure, after saving it if a path is given; its ending determines the format."""
    if path is not None:
        path = Path(path)
        known = figure.canvas.get_supported_filetypes()
        if not path.name or path.suffix[1:].lower() not in ("", *known):
            raise errors.ExperimentError(
                f"{str(path)!r} has not the name of a picture; its ending is the format, one of "
                f"{', '.join(sorted(known))}."
            )
        path = path if path.suffix[1:] else path.with_name(f"{path.name.rstrip('.')}.png")
        with replacing(path) as new:
            figure.savefig(new, format=path.suffix[1:], **options)
    return figure


def shrink_png(path: str | Path, colors: int = 128) -> None:
    """Write a PNG file again with a palette of at most `colors` colours: a third of its size.

    For pictures of few colours, as those of the documentation are; transparency is dropped.
    """
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    method = Image.Quantize.FASTOCTREE  # keeps a colour that few pixels have
    image = image.quantize(colors, method=method, dither=Image.Dither.NONE)
    with replacing(Path(path)) as new:
        image.save(new, format="png", optimize=True)
