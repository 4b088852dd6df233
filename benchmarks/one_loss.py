"""One small transformer, trained under every plan: do all losses lie on one line?

    python -m benchmarks.one_loss                  # train, store, draw, fill in the page's table
    python -m benchmarks.one_loss --folder RUNS    # the same, going on where it was stopped
    python -m benchmarks.one_loss --only experts   # one network; what is stored of others stays
    python -m benchmarks.one_loss --draw           # from what is stored

Two hundred steps under each plan of `benchmarks.one_loss_plans`, on eight virtual CPU devices, in
float32 and in float64, each in a process of its own. What is compared is the loss of every step,
before its update, with that of one device: a relative difference.

Beside them stand the losses that others have published of runs of one seed:
https://github.com/pytorch/torchtitan/issues/3029, a comment of 2026-08-04.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import plurax as px
from benchmarks import machine
from benchmarks.harness import ROOT
from benchmarks.one_loss_plans import DEVICES, NETWORKS, WAYS, Way, train, train_in_processes, ways
from plurax.report.colors import BLACK, GREY, LIGHT, PALETTE
from plurax.report.picture import shrink_png

STEPS = 200
PRECISIONS = ("float32", "float64")
STORED = ROOT / "benchmarks" / "results" / "one-loss.json"
PAGE = ROOT / "docs" / "one-loss-every-plan.md"
PICTURE = ROOT / "docs" / "assets" / "one-loss.png"
BEGIN, END = "<!-- one loss: begin -->", "<!-- one loss: end -->"

Losses = dict[str, dict[str, list[float]]]
"""Of each network under each way, the loss of each step."""

PUBLISHED = {
    "single-GPU": (12.05575, 10.89670, 9.81530),
    "fsdp2": (12.07003, 11.09161, 9.97418),
    "pp2": (12.04905, 10.87594, 9.81217),
    "cp2": (12.06936, 11.05554, 9.97089),
    "tp2": (12.05239, 11.01701, 9.95286),
    "fsdp2 x tp2 x pp2": (12.05729, 10.63687, 9.73056),
    "fsdp2 x tp2 x cp2": (12.04102, 11.00072, 9.93129),
    "tp2 x pp2 x cp2": (12.04419, 10.64952, 9.74151),
    "fsdp2 x pp2 x cp2": (12.07969, 10.77366, 9.77886),
    "ep2 x fsdp2": (12.07003, 11.10597, 9.96939),
    "ep2 x fsdp2 x tp2 x pp2": (12.03851, 10.82012, 9.80058),
    "ep2 x fsdp2 x tp2 x cp2": (12.05770, 11.02899, 9.92700),
    "ep2 x fsdp2 x pp2 x cp2": (12.06318, 10.81674, 9.77785),
    "ep8 x fsdp8": (12.03346, 10.88771, 9.86456),
    "pp4": (12.06240, 11.10712, 9.93111),
    "pp8": (12.04408, 10.81012, 9.81014),
    "tp4": (12.03252, 11.02760, 9.93343),
    "cp4": (12.07386, 11.02728, 9.94493),
}
PUBLISHED_STEPS = (1, 5, 10)

# --- Trained --------------------------------------------------------------------------------------


def train_all(precision: str, path: Path, networks: Sequence[str]) -> None:
    """Train what `path` does not have yet of networks, and write it after each plan."""
    px.virtual_devices(DEVICES)
    jax.config.update("jax_enable_x64", precision == "float64")
    found: Losses = json.loads(path.read_text()) if path.exists() else {}
    together: list[tuple[str, str]] = []
    for network in networks:
        of_network = found.setdefault(network, {})
        for name, way in ways(network).items():
            if name in of_network:
                continue
            if way.processes > 1:
                together.append((network, name))
                continue
            of_network[name] = train(network, way, STEPS)
            path.write_text(json.dumps(found))
            print(f"{precision}, {network}: {_said(of_network, name)}", flush=True)
    if together:
        for network, losses in train_in_processes(together, STEPS, precision == "float64").items():
            found[network] |= losses
        path.write_text(json.dumps(found))
        for network, name in together:
            print(f"{precision}, {network}: {_said(found[network], name)}", flush=True)


def _said(losses: dict[str, list[float]], name: str) -> str:
    largest = np.abs(differences(losses)[name]).max()
    return f"{name}: {losses[name][-1]:.6f}, differs by {largest:.1e}"


def differences(losses: dict[str, list[float]]) -> dict[str, np.ndarray]:
    """The relative differences from the first, which is one device."""
    alone, *_ = losses.values()
    return {name: np.asarray(each) / np.asarray(alone) - 1 for name, each in losses.items()}


def measure(folder: Path, networks: Sequence[str]) -> None:
    """Train networks in both precisions at the same time, and store what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {precision: folder / f"{precision}.json" for precision in PRECISIONS}
    running = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.one_loss", "--precision", precision,
                          "--into", str(path), "--only", *networks], cwd=ROOT)
        for precision, path in paths.items()
    ]  # fmt: skip
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit("training failed")
    trained = {precision: json.loads(path.read_text()) for precision, path in paths.items()}
    kept: dict[str, Any] = {"steps": STEPS, "described": {}, "losses": {}, "differences": {}}
    if set(networks) != set(NETWORKS):
        kept = json.loads(STORED.read_text())
    for network in networks:
        of_networks = {precision: trained[precision][network] for precision in PRECISIONS}
        names = list(ways(network))
        kept["described"][network] = machine.describe(None)
        kept["losses"][network] = {
            precision: losses[names[0]] for precision, losses in of_networks.items()
        }
        apart = {precision: differences(losses) for precision, losses in of_networks.items()}
        kept["differences"][network] = {
            name: {precision: [float(f"{one:.1e}") for one in apart[precision][name]]
                   for precision in PRECISIONS}
            for name in names
        }  # fmt: skip
    text = json.dumps(kept, indent=1)
    STORED.write_text(text.replace(",\n     ", ", ") + "\n")


# --- Shown ----------------------------------------------------------------------------------------

SIZE, DPI = (8.4, 7.0), 130
TITLES = {"dense": "a transformer", "experts": "with a mixture of experts"}


def draw(stored: dict[str, Any]) -> None:
    """Draw losses above, below them the largest difference so far."""
    figure = Figure(figsize=SIZE, dpi=DPI, facecolor="white", layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(2, 3))
    families = list(dict.fromkeys(way.family for way in WAYS))
    colors = {family: PALETTE[index % len(PALETTE)] for index, family in enumerate(families)}
    dashes = {family: "--" if families.index(family) >= len(PALETTE) else "-" for family in colors}
    for above, below, network in zip(*axes, NETWORKS, strict=True):
        of_network = stored["differences"][network]
        steps = np.arange(1, stored["steps"] + 1)
        for name, way in ways(network).items():
            style = {"color": colors[way.family], "linestyle": dashes[way.family]}
            for precision in PRECISIONS:
                apart = np.asarray(of_network[name][precision])
                alone = np.asarray(stored["losses"][network][precision])
                above.plot(steps, alone * (1 + apart), linewidth=0.9, **style)
                largest = np.maximum.accumulate(np.abs(apart))
                below.semilogy(steps, np.where(largest > 0, largest, np.nan), linewidth=0.9,
                               **style)  # fmt: skip
        _name(above, below, stored, network)
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("largest relative difference\nfrom one device so far")
    for family in families:
        axes[0, 0].plot([], [], color=colors[family], linestyle=dashes[family], label=family)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.savefig(PICTURE)
    shrink_png(PICTURE)


def _name(above: Axes, below: Axes, stored: dict[str, Any], network: str) -> None:
    """Titles, grids, and what others have published."""
    count = len(stored["differences"][network])
    above.set_title(f"{TITLES[network]}: {2 * count} runs, {count} plans", fontsize=10)
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(color=LIGHT, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    alone = np.asarray(PUBLISHED["single-GPU"])
    for losses in list(PUBLISHED.values())[1:]:
        below.semilogy(PUBLISHED_STEPS, np.abs(np.asarray(losses) / alone - 1), "x", color=GREY,
                       markersize=4, markeredgewidth=0.8)  # fmt: skip
    below.text(16, 6e-3, "18 plans, torchtitan#3029,\nsteps 1, 5 and 10", fontsize=8.5,
               color="#444444", va="center")  # fmt: skip
    below.set_ylim(1e-17, 1e-1)
    for precision in PRECISIONS:
        most = largest_of(stored, network, precision)
        below.text(stored["steps"], 2.2 * most, f"{precision}: at most {most:.1e}", fontsize=9,
                   ha="right", va="bottom", color=BLACK)  # fmt: skip


def largest_of(stored: dict[str, Any], network: str, precision: str) -> float:
    """The largest difference over all steps and plans."""
    of_network = stored["differences"][network].values()
    return max(float(np.abs(each[precision]).max()) for each in of_network)


def tables(stored: dict[str, Any]) -> str:
    """The largest difference of each plan, and of all, in Markdown."""
    apart = stored["differences"]

    def cell(network: str, name: str, precision: str) -> str:
        if name not in apart[network]:
            return ""
        largest = np.abs(apart[network][name][precision]).max()
        return f"{largest:.1e}" if largest else "0"

    def cells(name: str) -> str:
        each = ((network, precision) for network in NETWORKS for precision in PRECISIONS)
        return " | ".join(cell(network, name, precision) for network, precision in each)

    lines = [
        "| plan | transformer, float32 | float64 | experts, float32 | float64 |",
        "|---|---:|---:|---:|---:|",
        *(f"| {_in_table(way)} | {cells(way.name)} |" for way in WAYS[1:]),
        "| **all** | " + " | ".join(
            f"**{largest_of(stored, network, precision):.1e}**"
            for network in NETWORKS for precision in PRECISIONS
        ) + " |",
        "",
        " ".join(_where(stored["described"][network], network) for network in NETWORKS),
    ]  # fmt: skip
    return "\n".join(lines)


def _where(described: dict[str, Any], network: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    title = TITLES[network].removeprefix("a ").capitalize()
    return f"{title}: {machine.label(described['machine'])}, {described['date']}; {versions}."


def _in_table(way: Way) -> str:
    # A piece of code for each field, so that a narrow table has lines of them.
    fields = ", ".join(f"`{field}`" for field in re.split(r", (?=\w+=)", way.sizes) if field)
    return ": ".join(text for text in (way.said, fields) if text)


def show() -> None:
    """Draw what is stored, and fill in the page."""
    stored = json.loads(STORED.read_text())
    draw(stored)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = f"{before}{BEGIN}\n\n{tables(stored)}\n\n{END}{rest.split(END)[1]}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where losses are kept while it trains")
    parser.add_argument(
        "--only", nargs="+", choices=NETWORKS, default=[*NETWORKS], metavar="NETWORK",
        help="networks that are trained",
    )  # fmt: skip
    parser.add_argument("--draw", action="store_true", help="draw what is stored")
    parser.add_argument("--precision", choices=PRECISIONS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.precision:
        train_all(options.precision, options.into, options.only)
        return
    if not options.draw:
        with tempfile.TemporaryDirectory() as folder:
            measure(options.folder or Path(folder), options.only)
    show()


if __name__ == "__main__":
    main()
