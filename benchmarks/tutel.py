"""Rows sent to experts over eight devices, beside Tutel's layer on eight processes.

    python -m venv .venv-tutel
    .venv-tutel/bin/python -m pip install torch==2.13.0 numpy setuptools wheel
    NO_CUDA=1 .venv-tutel/bin/python -m pip install --no-build-isolation \\
        git+https://github.com/microsoft/Tutel@ac0e51b943bb7084d4a6a7243e44a4afe04b9911
    python -m benchmarks.tutel .venv-tutel/bin/python

The network, tokens and first weights of `benchmarks.sent_experts`, with sorted rows. Tutel (Hwang
et al. 2022, https://arxiv.org/abs/2206.03382) sends buffers of equal room for each expert: with
`capacity` 1 as many rows as an even load needs, and drops the others; with 0 as many as the
busiest expert has, and drops none. Processor seconds are those of all devices, medians of steps in
turns; `sent` is what a device sends to others by all-to-all in a step; `apart` the largest
difference of the dense layer's new weights to one device.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import plurax as px
from benchmarks import experts, sent_experts
from benchmarks.compiled_steps import median_seconds
from benchmarks.harness import Worker
from benchmarks.sent_experts import DEVICES, HERE

ROUNDS = 11
CAPACITIES = (1.0, 0.0)


def main(python: str) -> None:
    """Print a row for plurax and for Tutel with each capacity."""
    px.virtual_devices(DEVICES)
    way, devices = sent_experts.WAYS["sorted rows"], jax.devices()[:DEVICES]
    ours = sent_experts.compiled(way, "plurax", devices, HERE)
    alone = sent_experts.compiled(way, "kept on each device", devices, HERE)
    shape = DEVICES, HERE // DEVICES, experts.WIDTH
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for step in (ours, alone):
        step.start(None, x)
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "arrays.npz"
        np.savez(arrays, x=x, **ours.params)
        settings = {
            "devices": DEVICES, "cores": 1, "platform": "cpu", "arrays": str(arrays),
            "width": experts.WIDTH, "hidden": experts.HIDDEN, "choices": experts.CHOICES,
            "rate": experts.RATE,
        }  # fmt: skip
        peers = {
            capacity: Worker(python, "tutel_experts", settings | {"capacity": capacity})
            for capacity in CAPACITIES
        }
        seconds = []
        for turn in range(ROUNDS + 1):  # the first is not counted
            taken = median_seconds([ours], 1)
            seconds += taken if turn else []
            for peer in peers.values():
                peer.run("step")
        for _ in range(ROUNDS + 1):
            alone.step()
        exact = alone.params["in"]
        sent = sum(one.bytes_sent for one in ours.sent if one.kind == "all-to-all" and one.trips)
        apart = float(np.abs(ours.params["in"] - exact).max())
        _print("plurax", statistics.median(seconds), sent, apart)
        for capacity, peer in peers.items():
            answers = peer.answers["step"]
            median = statistics.median(one["processor_seconds"] for one in answers[1:])
            apart = float(np.abs(np.asarray(answers[-1]["in"]) - exact).max())
            _print(f"Tutel, capacity {capacity:g}", median, answers[-1]["sent"], apart)
            peer.close()


def _print(name: str, seconds: float, sent: float, apart: float) -> None:
    print(f"{name:20} {seconds:5.2f} s of processor time, {sent / 2**20:5.2f} MiB sent, "
          f"{apart:.0e} apart")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", help="the interpreter of an environment with Tutel")
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main(parser.parse_args().python))
