"""Create Matplotlib figures. Matplotlib is an extra, imported when the first figure is created."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plurax import errors

if TYPE_CHECKING:
    import matplotlib.figure


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


def saved(
    figure: "matplotlib.figure.Figure", path: str | Path | None, **options: Any
) -> "matplotlib.figure.Figure":
    """Return the figure, after saving it if a path is given; its ending determines the format."""
    if path is not None:
        figure.savefig(path, **options)
    return figure
