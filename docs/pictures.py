"""The pictures of the documentation that show plans and schedules.

    python docs/pictures.py

writes `docs/assets/schedules.png` and `docs/assets/what-is-split.png`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import plurax as px

ASSETS = Path(__file__).parent / "assets"
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""By name, with the stages of a device."""
OWNERS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
SHARED = "#cfcfcf"


# --- What is split --------------------------------------------------------------------------------

LAYERS = 4
Owner = Callable[[float, float, float], int | None]
"""From a layer, a place across it and one along its thickness, 0 to 1, the device; None: all."""


def _all(layer: float, across: float, thick: float) -> int | None:
    return None


def _across(layer: float, across: float, thick: float) -> int | None:
    return int(4 * across)


def _by_layer(layer: float, across: float, thick: float) -> int | None:
    return int(layer)


def _inside(layer: float, across: float, thick: float) -> int | None:
    return None if thick > 0.8 else int(5 * thick)


def _by_halves(layer: float, across: float, thick: float) -> int | None:
    return int(layer) // 2 + 2 * int(2 * across)


def _by_pairs(layer: float, across: float, thick: float) -> int | None:
    return 4 + int(layer) // 2


PLANS: dict[str, tuple[Owner, Owner, Owner]] = {
    "data=4": (_all, _all, _across),
    "data=4, zero=1": (_all, _across, _across),
    "data=4, zero=3": (_across, _across, _across),
    "tensor=4": (_across, _across, _inside),
    "pipeline=4": (_by_layer, _by_layer, _by_layer),
    "data=2, pipeline=2": (_by_pairs, _by_pairs, _by_halves),
}
PARTS = ("parameters", "optimizer's state", "activations")


def draw_what_is_split(path: Path) -> None:
    """For each of some plans which of four devices has which part of what."""
    figure = Figure(figsize=(9.0, 4.4), layout="constrained", dpi=120)
    panels = figure.subfigures(2, 3, squeeze=False).ravel()
    for panel, (name, owners) in zip(panels, PLANS.items(), strict=True):
        panel.suptitle(f"Plan({name})", fontsize=10, family="monospace")
        for axis, part, owner in zip(panel.subplots(1, 3), PARTS, owners, strict=True):
            _draw_part(axis, owner)
            axis.set_title(part, fontsize=8)
            axis.set_xlabel("examples" if part == "activations" else "width", fontsize=7.5)
        panel.axes[0].set_ylabel("layers", fontsize=7.5)
    handles = [Patch(color=color, label=f"device {d}") for d, color in enumerate(OWNERS)]
    handles.append(Patch(color=SHARED, label="every device"))
    handles.append(
        Patch(facecolor=OWNERS[0], edgecolor=OWNERS[2], hatch="//", linewidth=0,
              label="both devices of these colours")
    )  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path)


def _draw_part(axis: Axes, owner: Owner) -> None:
    columns, strips = 4, 5
    height = 0.84
    for layer in range(LAYERS):
        for column in range(columns):
            for strip in range(strips):
                device = owner(layer, column / columns, (strip + 0.5) / strips)
                at = (column / columns, layer + height * strip / strips)
                _draw_box(axis, at, (1 / columns, height / strips), device)
    axis.set_xlim(0, 1)
    axis.set_ylim(LAYERS, 0)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def _draw_box(
    axis: Axes, at: tuple[float, float], size: Sequence[float], device: int | None
) -> None:
    if device is not None and device >= len(OWNERS):
        first = device - len(OWNERS)
        axis.add_patch(
            Rectangle(at, *size, facecolor=OWNERS[first], edgecolor=OWNERS[first + 2],
                      hatch="//", linewidth=0)
        )  # fmt: skip
        return
    color = SHARED if device is None else OWNERS[device]
    axis.add_patch(Rectangle(at, *size, facecolor=color, linewidth=0))


if __name__ == "__main__":
    schedules = [
        px.pipeline.make_schedule(name, 4, 8, chunks) for name, chunks in SCHEDULES.items()
    ]
    px.pipeline.draw_schedules(schedules, ASSETS / "schedules.png")
    with matplotlib.rc_context({"hatch.linewidth": 5}):
        draw_what_is_split(ASSETS / "what-is-split.png")
