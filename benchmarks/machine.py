"""What the measurements ran on: processor, graphics processors, versions."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_JAX = """
import json, jax
from importlib.metadata import distributions, version
found = {one.metadata["Name"].lower() for one in distributions()}
names = ("jax", "jaxlib", "optax", "numpy", "ray")
print(json.dumps({
    "platform": jax.default_backend(),
    "devices": [device.device_kind for device in jax.devices()],
    "versions": {name: version(name) for name in names if name in found},
}))
"""

_PEERS = """
import json
from importlib.metadata import distributions, version
names = {"torch": "torch", "tensorflow": "tensorflow", "keras": "keras", "jax": "jax of the peers"}
found = {one.metadata["Name"].lower() for one in distributions()}
print(json.dumps({label: version(name) for name, label in names.items() if name in found}))
"""


def describe(peers: str | None) -> dict[str, Any]:
    """The machine, versions and date, as they go to the results."""
    # In another process: this one stays free of JAX, and the device free for the workers.
    found = _ask(sys.executable, _JAX)
    versions = {"python": platform.python_version(), **found["versions"]}
    if peers is not None:
        versions |= _ask(peers, _PEERS)
    gpus = found["devices"] if found["platform"] == "gpu" else []
    return {
        "machine": {"cpu": _cpu_model(), "cores": cores(), "gpus": gpus},
        "platform": "gpu" if gpus else "cpu",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def label(machine: dict[str, Any]) -> str:
    """A machine in a few words, such as `Intel Xeon 2.90GHz, 2 cores`."""
    name = re.sub(r"\((R|TM)\)|\bCPU\b|Processor|@", " ", machine["cpu"])
    words = f"{' '.join(name.split())}, {machine['cores']} cores"
    gpus = machine["gpus"]
    return f"{len(gpus)} × {gpus[0]} ({words})" if gpus else words


def file_name(description: dict[str, Any]) -> str:
    """`<machine>-<date>.json`."""
    words = re.sub(r"[^a-z0-9.]+", "-", label(description["machine"]).lower()).strip("-")
    return f"{words}-{description['date']}.json"


def _ask(python: str, code: str) -> dict[str, Any]:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()
