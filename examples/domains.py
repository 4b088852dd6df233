"""Rock domains from drill holes: coordinates in, domain out, then a million blocks at once.

The ground is simulated, 1280 m east by 1000 m north by 400 m deep, and so known everywhere.
`rock_domain` is the whole geological model, told in the order in which it happened:

1. Six layers are laid down on each other: gneiss basement, dolomite, black shale, limestone,
   siltstone, sandstone (contacts at stratigraphic heights 70, 140, 195, 260 and 320 m).
2. They are folded: sinusoidal folds of 75 m amplitude and 620 m wavelength, axes trending 20° east
   of north and plunging 8° that way, so the layers come up to the south.
3. A normal fault offsets them: striking 350°, dipping 60° east; its east side slid 110 m down dip.
4. A dolerite dyke, 36 m thick, striking 60° and dipping 80° south-east, cuts folds and fault.
5. Erosion cuts across everything, and 20 to 50 m of loose cover is laid on top.

Drill holes start on a jittered grid, dip 55° to 85° across the folds, and run to the base of the
model. They are logged every 1, 1.5 or 2 m; 2 % of the intervals are logged as a wrong domain. An
interval counts by its length, so losses and accuracies are per metre drilled. Every tenth hole is
held out whole: the neighbours of an interval in its own hole would give the answer away.

The network is a residual multilayer perceptron on random Fourier features of the coordinates. At
the default width it has 131 × 1792 + 3 × 1792² + 1792 × 8 weights and 4 × 1792 + 8 biases: 9.9
million parameters.

The picture takes a tenth of that (width 512) and 20 epochs of 2048 intervals, three minutes of CPU
time. Measured: 94.2 % of the held-out metres right, where 98 % would be perfect, and 96.9 % of
1,024,000 blocks. What is wrong lies along the fault, the dyke and the contacts.

    plurax train examples/domains.py --plan.precision bfloat16      # the full size, on a GPU
    python examples/domains.py                                      # a tenth of it, and a picture
"""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Int, Key
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import plurax as px

LAYERS = ("gneiss", "dolomite", "black shale", "limestone", "siltstone", "sandstone")
DOMAINS = (*LAYERS, "dolerite dyke", "cover")
DYKE, COVER = 6, 7
EXTENT = np.array([1280.0, 1000.0, 400.0])  # metres: east, north, elevation
BLOCKS = (128, 100, 80)  # of 10 × 10 × 5 m: 1,024,000 of them

# --- The ground -------------------------------------------------------------------------------


def rock_domain(xyz: Float[np.ndarray, "N 3"]) -> Int[np.ndarray, "N"]:
    """The true domain at points given as east, north and elevation in metres."""
    p = np.asarray(xyz, np.float64) - [640.0, 500.0, 0.0]

    # Undo the fault: what lies above its plane came from up the dip.
    across, down_dip = plane(strike=350.0, dip=60.0)
    hanging_wall = (p - [110.0, 0.0, 200.0]) @ across > 0.0
    laid = p - 110.0 * hanging_wall[:, None] * down_dip

    # Undo the folds: the height of a point in the flat pile it was laid down in.
    trend = np.radians(20.0)
    along = laid @ [np.sin(trend), np.cos(trend), 0.0]
    beside = laid @ [np.cos(trend), -np.sin(trend), 0.0]
    fold = 75.0 * np.sin(2.0 * np.pi * beside / 620.0) - np.tan(np.radians(8.0)) * along
    domain = np.searchsorted([70.0, 140.0, 195.0, 260.0, 320.0], laid[:, 2] - fold)

    # What came later overprints what was there.
    across, _ = plane(strike=60.0, dip=80.0)
    dyke = np.abs((p - [-150.0, -80.0, 200.0]) @ across) < 18.0
    cover_base = 365.0 + 15.0 * np.sin(p[:, 0] / 130.0) * np.cos(p[:, 1] / 170.0)
    domain = np.where(dyke, DYKE, domain)
    return np.where(p[:, 2] > cover_base, COVER, domain).astype(np.int32)


def plane(strike: float, dip: float) -> tuple[np.ndarray, np.ndarray]:
    """The upward normal and the down-dip direction of a plane (degrees; dips right of strike)."""
    s, d = np.radians(strike), np.radians(dip)
    right, up = np.array([np.cos(s), -np.sin(s), 0.0]), np.array([0.0, 0.0, 1.0])
    return np.sin(d) * right + np.cos(d) * up, np.cos(d) * right - np.sin(d) * up


def drill(holes: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Logged intervals of all holes, one row each.

    `xyz_cm` (N, 3) is the middle of the interval in whole centimetres, as a survey has it: bfloat16
    would round metres to the nearest 4 out here, and whole numbers are left alone. `domain` (N,) is
    what was logged, `length` (N,) is in metres, `hole` (N,) counts from 0.
    """
    rng = np.random.default_rng(seed)
    rows = max(1, round(np.sqrt(holes * EXTENT[1] / EXTENT[0])))
    columns = -(-holes // rows)
    grid = np.stack(np.divmod(np.arange(holes), rows), axis=1)
    collar = (grid + 0.5 + rng.uniform(-0.3, 0.3, (holes, 2))) * EXTENT[:2] / [columns, rows]
    azimuth = np.radians(rng.choice([110.0, 290.0], holes) + rng.normal(0.0, 25.0, holes))
    dip = np.radians(rng.uniform(55.0, 85.0, holes))
    step = rng.choice([1.0, 1.5, 2.0], holes)
    heading = np.stack(
        [np.sin(azimuth) * np.cos(dip), np.cos(azimuth) * np.cos(dip), -np.sin(dip)], axis=1
    )

    hole = np.repeat(np.arange(holes), (EXTENT[2] / np.sin(dip) / step).astype(int))
    number = np.arange(hole.size) - np.searchsorted(hole, hole)
    start = np.column_stack([collar, np.full(holes, EXTENT[2])])
    xyz = start[hole] + ((number + 0.5) * step[hole])[:, None] * heading[hole]
    inside = np.all((xyz > 0.0) & (xyz < EXTENT), axis=1)
    hole, xyz = hole[inside], xyz[inside]

    domain = rock_domain(xyz)
    slip = np.where(rng.random(hole.size) < 0.02, rng.integers(1, len(DOMAINS), hole.size), 0)
    return {
        "xyz_cm": np.rint(100.0 * xyz).astype(np.int32),
        "domain": ((domain + slip) % len(DOMAINS)).astype(np.int32),
        "length": step[hole].astype(np.float32),
        "hole": hole.astype(np.int32),
    }


# --- The network ------------------------------------------------------------------------------

# Cycles per metre of 64 plane waves about 3 km long. Shorter ones fit the holes no better and
# scatter specks between them.
FREQUENCIES = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32) / 3000.0


def features(xyz_cm: Int[Array, "B 3"]) -> Float[Array, "B 131"]:
    """Coordinates about the middle of the model, and plane waves through it, in float32."""
    metres = xyz_cm.astype(jnp.float32) / 100.0 - EXTENT.astype(np.float32) / 2.0
    phase = 2.0 * np.float32(np.pi) * metres @ FREQUENCIES
    return jnp.concatenate([metres / 500.0, jnp.sin(phase), jnp.cos(phase)], axis=1)


def init(key: Key[Array, ""], width: int) -> dict[str, Any]:
    """Parameters; the three residual layers are stacked in one array with leading dim 3."""
    read_key, mix_key = jax.random.split(key)
    inputs, outputs = 3 + 2 * FREQUENCIES.shape[1], len(DOMAINS)
    read = jax.random.normal(read_key, (inputs, width)) * (2.0 / inputs) ** 0.5
    mix = jax.random.normal(mix_key, (3, width, width)) * (0.5 / width) ** 0.5
    return {
        "read": {"weight": read, "bias": jnp.zeros(width)},
        "mix": {"weight": mix, "bias": jnp.zeros((3, width))},
        "name": {"weight": jnp.zeros((width, outputs)), "bias": jnp.zeros(outputs)},
    }


def normalised(h_BW: Float[Array, "B W"]) -> Float[Array, "B W"]:
    """Each row scaled to a mean square of 1."""
    h32_BW = h_BW.astype(jnp.float32)
    mean_square_B1 = jnp.mean(h32_BW**2, axis=1, keepdims=True)
    return (h32_BW * jax.lax.rsqrt(mean_square_B1 + 1e-6)).astype(h_BW.dtype)


def logits(params: dict[str, Any], xyz_cm: Int[Array, "B 3"]) -> Float[Array, "B 8"]:
    """Unnormalised log probabilities of the domains."""

    def affine(p: dict[str, Array], h_BI: Array) -> Array:
        return h_BI @ p["weight"] + p["bias"]

    def layer(h_BW: Array, p: dict[str, Array]) -> tuple[Array, None]:
        return h_BW + jax.nn.gelu(affine(p, normalised(h_BW))), None

    x_BF = features(xyz_cm).astype(params["read"]["weight"].dtype)
    h_BW = jax.nn.gelu(affine(params["read"], x_BF))
    h_BW, _ = jax.lax.scan(layer, h_BW, params["mix"], unroll=True)  # 20 % faster on CPU
    return affine(params["name"], normalised(h_BW)).astype(jnp.float32)


def evaluate(params: dict[str, Any], batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Cross entropy (B,) and whether the likeliest domain is the logged one (B,)."""
    logits_BD = logits(params, batch["xyz_cm"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BD, batch["domain"])
    right = jnp.argmax(logits_BD, axis=1) == batch["domain"]
    return losses, {"accuracy": right.astype(jnp.float32)}


def predict(params: dict[str, Any], inputs: dict[str, Array]) -> dict[str, Array]:
    """The likeliest domain (B,) and its probability (B,)."""
    probability_BD = jax.nn.softmax(logits(params, inputs["xyz_cm"]))
    return {"domain": probability_BD.argmax(axis=1), "probability": probability_BD.max(axis=1)}


def experiment(
    width: int = 1792,
    holes: int = 320,
    epochs: int = 40,
    batch_size: int = 16384,
    learning_rate: float = 2e-3,
) -> px.Experiment:
    """Rock domains, on all devices.

    The learning rate falls to a tenth over these `epochs` of these batches: give them as
    `--experiment.epochs`, and the schedule follows.
    """
    intervals = drill(holes)
    heldout = intervals["hole"] % 10 == 9
    steps = epochs * -(-np.sum(~heldout) // batch_size)
    schedule = optax.cosine_decay_schedule(learning_rate, steps, alpha=0.1)
    return px.Experiment(
        task=px.Task(
            init=lambda key: init(key, width),
            loss=lambda params, batch, keys: evaluate(params, batch),
            evaluate=evaluate,
            predict=predict,
            weight=lambda batch: batch["length"],
        ),
        optimizer=optax.adamw(schedule, weight_decay=0.1),
        data={name: values[~heldout] for name, values in intervals.items()},
        evaluation={name: values[heldout] for name, values in intervals.items()},
        plan=px.Plan(data=jax.device_count()),
        epochs=epochs,
        batch_size=batch_size,
        seed=0,
    )


# --- The picture ------------------------------------------------------------------------------

COLOURS = ("#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#F0E442", "#000000", "#BBBBBB")
RIGHT, WRONG, HOLE = "#EEEEEE", "#D55E00", "#000000AA"
AXES = ("east (m)", "north (m)", "elevation (m)")
SECTIONS = ((2, 222.5, "plan at 222 m"), (1, 355.0, "section at 355 m north"),
            (0, 805.0, "section at 805 m east"))  # fmt: skip


def draw_sections(
    truth: Int[np.ndarray, "X Y Z"],
    predicted: Int[np.ndarray, "X Y Z"],
    drilled: dict[str, np.ndarray],
    path: Path,
) -> None:
    """One row per section: the truth, the prediction, and the blocks where they differ.

    With the pieces of drill holes that are within 25 m of the section.
    """
    wrong = truth != predicted
    xyz = drilled["xyz_cm"] / 100.0
    figure = Figure(figsize=(15, 9.2), layout="constrained")
    grid = figure.subplots(3, 3, height_ratios=[1000, 400, 512])
    for row, (fixed, at, name) in zip(grid, SECTIONS, strict=True):
        across, up = (dim for dim in range(3) if dim != fixed)
        index = int(at / EXTENT[fixed] * BLOCKS[fixed])
        near = np.abs(xyz[:, fixed] - at) < 25.0
        points, hole = xyz[near][:, [across, up]], drilled["hole"][near]
        traces = [points[hole == h] for h in np.unique(hole)]
        share = np.take(wrong, index, axis=fixed).mean()
        columns = ((truth, "true"), (predicted, "predicted"), (wrong, f"{share:.1%} wrong"))
        for axes, (blocks, kind) in zip(row, columns, strict=True):
            colours = (RIGHT, WRONG) if blocks is wrong else COLOURS
            axes.imshow(
                np.take(blocks, index, axis=fixed).T,
                origin="lower",
                extent=(0.0, EXTENT[across], 0.0, EXTENT[up]),
                cmap=ListedColormap(colours),
                vmin=-0.5,
                vmax=len(colours) - 0.5,
                interpolation="nearest",
            )
            axes.add_collection(LineCollection(traces, colors=HOLE, linewidths=0.9))
            axes.set_title(f"{name}: {kind}", fontsize=12, loc="left")
            axes.set_xlabel(AXES[across])
        row[0].set_ylabel(AXES[up])
    labelled = zip((*COLOURS, WRONG), (*DOMAINS, "wrong"), strict=True)
    key: list[Artist] = [Patch(facecolor=colour, label=label) for colour, label in labelled]
    key.append(Line2D([], [], color=HOLE, linewidth=0.9, label="training hole within 25 m"))
    figure.legend(handles=key, loc="outside lower center", ncols=5, frameon=False, fontsize=12)
    figure.savefig(path, dpi=110)


def main(
    width: int = 512,
    epochs: int = 20,
    batch_size: int = 2048,
    output: Path = Path("sections.png"),
) -> None:
    """Train, predict every block of the model, and draw sections through it."""
    chosen = experiment(width=width, epochs=epochs, batch_size=batch_size)
    result = px.fit(**vars(chosen))
    heldout = result.program.evaluate(result.state, chosen.evaluation)
    print(f"{heldout['accuracy']:.2%} of the metres in held-out holes right")

    sides = [(np.arange(n) + 0.5) * e / n for n, e in zip(BLOCKS, EXTENT, strict=True)]
    centres = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 3)
    inputs = {"xyz_cm": np.rint(100.0 * centres).astype(np.int32)}
    began = time.perf_counter()
    predicted = result.program.predict(result.state, inputs)["domain"]
    seconds = time.perf_counter() - began
    truth = rock_domain(centres)
    right = np.mean(predicted == truth)
    print(f"{len(truth):,} blocks predicted in {seconds:.1f} s, {right:.2%} right")
    draw_sections(truth.reshape(BLOCKS), predicted.reshape(BLOCKS), chosen.data, output)
    print(f"wrote {output}")


if __name__ == "__main__":
    tyro.cli(main)
