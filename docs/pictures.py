"""The pictures of the documentation that show plans, schedules and searches.

    python docs/pictures.py

writes `schedules.png`, `what-is-split.png`, `search.png`, `layer.png` and `estimates.png` into
`docs/assets`, and `servers.png` and `workers.png`, for which it needs Ray. It takes some minutes,
most of them to search and to train, and no device.
"""

import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, PyTree
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import plurax as px
from plurax import experiment

ASSETS = Path(__file__).parent / "assets"
EXAMPLES = Path(__file__).parents[1] / "examples"
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


# --- A search -------------------------------------------------------------------------------------


def draw_a_search() -> None:
    """Search a plan for a transformer of six billion parameters, and draw what was found.

    As `plurax plan examples/language_model.py --search` does with the options in the guide.
    """
    load, _ = experiment.load(EXAMPLES / "language_model.py")
    made = load(width=4096, depth=32, heads=32, window=2048, batch_size=64)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype), made.data)
    machine = px.Machine.preset("8xA100-80GB")
    pinned = {"precision": "bfloat16", "pipeline": 1, "remat": "none"}
    found = px.search(made.task, made.optimizer, like, machine, pinned=pinned, seconds=60.0)
    print(found)
    px.analysis.draw_search(found, ASSETS / "search.png")
    px.analysis.draw_layer(found, ASSETS / "layer.png")
    best = found.best
    shown = {
        f"remat={remat!r}": px.estimate(
            made.task, made.optimizer, dataclasses.replace(best, strategies=None, remat=remat),
            like, machine,
        )
        for remat in ("none", "dots", "full")
    }  # fmt: skip
    px.analysis.draw_estimates(shown, ASSETS / "estimates.png")


# --- Parameter servers ----------------------------------------------------------------------------

SERVERS = {
    "sync": px.Servers(shards=2, workers=4),
    "bounded, staleness=3": px.Servers(shards=2, workers=4, mode="bounded", staleness=3),
    "async": px.Servers(shards=2, workers=4, mode="async"),
}
"""Runs side by side."""


def draw_runs_with_servers() -> None:
    """Train the digits with four workers of which one is slow, in each mode, and with deaths."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs: dict[str, Path] = {}
        for mode, servers in SERVERS.items():
            runs[mode] = _trained(servers, folder / mode)
        px.analysis.draw_servers(runs, ASSETS / "servers.png")
        dying = dataclasses.replace(SERVERS["bounded, staleness=3"], snapshot_every=20)
        px.analysis.draw_workers(_trained(dying, folder / "dying", 130), ASSETS / "workers.png")


def _trained(servers: px.Servers, output: Path, deaths: int | None = None) -> Path:
    """Train in a directory; a server ends after so many gradients of parameters, a worker later."""
    load, _ = experiment.load(EXAMPLES / "digits.py")
    made, marks = load(), output / "marks"
    marks.mkdir(parents=True)
    px.fit(
        _uneven(made.task, marks, deaths is not None),
        optax.chain(_ending(marks, deaths), optax.adam(1e-3)),
        made.data, batch_size=256 if servers.mode == "sync" else 64, epochs=4,
        servers=servers, output=output, progress=False,
    )  # fmt: skip
    return output


def _uneven(task: px.Task, marks: Path, dies: bool) -> px.Task:
    """The task with a loss that takes 0.05 s more, in the first process that computes it 0.2 s.

    Where it `dies`, the second process is killed after six seconds.
    """
    here: list[float] = []

    def sleep(x: np.ndarray) -> np.ndarray:
        if not here:
            here.extend([0 if _first(marks / "slow") else 1 + _first(marks / "dies")])
            here.append(time.monotonic())
        if dies and here[0] == 2 and time.monotonic() - here[1] > 6:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05 if here[0] else 0.2)
        return x

    def loss(params: PyTree, batch: PyTree, keys: Array | None = None) -> tuple[Array, PyTree]:
        values, metrics = task.loss(params, batch, keys)
        zero = jnp.zeros((), values.dtype)
        # Added, so that it is not dropped.
        zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), values.dtype), zero)
        return values + jax.lax.stop_gradient(zero), metrics

    return dataclasses.replace(task, loss=loss)


def _ending(marks: Path, deaths: int | None) -> optax.GradientTransformation:
    """Gradients as they are; after so many of them the first server that gets there is killed."""
    seen: list[int] = []

    def look(grad: np.ndarray) -> np.ndarray:
        seen.append(1)
        if deaths is not None and len(seen) > deaths and _first(marks / "server"):
            os.kill(os.getpid(), signal.SIGKILL)
        return grad

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        like = jax.tree.map(lambda grad: jax.ShapeDtypeStruct(grad.shape, grad.dtype), grads)
        return jax.tree.map(
            lambda *one: jax.pure_callback(look, one[1], one[0]), grads, like
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _first(mark: Path) -> bool:
    """Whether this process is the first that asks."""
    try:
        mark.open("x").close()
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    draw_runs_with_servers()
    draw_a_search()
    schedules = [
        px.pipeline.make_schedule(name, 4, 8, chunks) for name, chunks in SCHEDULES.items()
    ]
    px.pipeline.draw_schedules(schedules, ASSETS / "schedules.png")
    with matplotlib.rc_context({"hatch.linewidth": 5}):
        draw_what_is_split(ASSETS / "what-is-split.png")
