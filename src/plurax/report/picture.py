"""Create Matplotlib figures. Matplotlib is an extra, imported when the first figure is created."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plurax import errors
from plurax.disk import replacing

if TYPE_CHECKING:
    import matplotlib.figure

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


def check_matplotlib() -> None:
    """Raise `MissingPackageError` where Matplotlib is not installed, before expensive work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise errors.package_missing("Drawing", "matplotlib", "pictures") from None


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
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


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
