"""The rock domains in PyTorch: DistributedDataParallel over processes, and inference.

`settings["work"]` is `train` (sides `step` and `epoch`) or `predict` (sides `few` and `all`).
"""

import math
import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workers.serve import Settings, Side, SkippedError, serve


class Domains(nn.Module):
    """The network of `examples/domains.py`, layer for layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor(settings["frequencies"]))
        self.register_buffer("middle", torch.tensor(settings["extent"]) / 2)
        width = settings["width"]
        self.read = nn.Linear(3 + 2 * self.frequencies.shape[1], width)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.name = nn.Linear(width, settings["classes"])

    def forward(self, xyz_cm: Tensor) -> Tensor:
        metres = xyz_cm.float() / 100 - self.middle
        phase = 2 * math.pi * metres @ self.frequencies
        x = torch.cat([metres / 500, torch.sin(phase), torch.cos(phase)], dim=1)
        h = nn.functional.gelu(self.read(x), approximate="tanh")
        for layer in self.mix:
            h = h + nn.functional.gelu(layer(_normalised(h)), approximate="tanh")
        return self.name(_normalised(h))


def _normalised(h: Tensor) -> Tensor:
    return nn.functional.rms_norm(h, (h.shape[1],), eps=1e-6)


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    on_gpu = settings["platform"] == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise SkippedError("this PyTorch sees no GPU")
    if on_gpu and torch.cuda.device_count() < settings["devices"]:
        raise SkippedError(f"needs {settings['devices']} GPUs")
    parameters = sum(p.numel() for p in Domains(settings).parameters())
    work = _train if settings["work"] == "train" else _predict
    return work(settings), {"parameters": parameters}


def _device(settings: Settings, rank: int = 0) -> torch.device:
    return torch.device("cuda", rank) if settings["platform"] == "gpu" else torch.device("cpu")


# ---- training ----------------------------------------------------------------------------------


def _train(settings: Settings) -> dict[str, Side]:
    """One process for each device; they wait for requests in their pipes, using no core."""
    spawn = multiprocessing.get_context("spawn")
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    pipes: list[Connection] = []
    for rank in range(settings["devices"]):
        here, there = spawn.Pipe()
        arguments = (rank, settings, there, f"file://{meeting}")
        spawn.Process(target=_rank, args=arguments, daemon=True).start()
        pipes.append(here)

    def run(side: str, units: int) -> None:
        for pipe in pipes:
            pipe.send((side, units))
        for pipe in pipes:
            pipe.recv()

    return {
        "step": lambda units: run("step", units),
        "epoch": lambda units: run("epoch", units),
    }


def _rank(rank: int, settings: Settings, requests: Connection, meeting: str) -> None:
    devices, size, steps = settings["devices"], settings["batch"], settings["steps"]
    device = _device(settings, rank)
    torch.set_num_threads(max(1, settings["cores"] // devices))
    torch.distributed.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=meeting,
        rank=rank,
        world_size=devices,
    )
    torch.manual_seed(0)
    network = DistributedDataParallel(
        Domains(settings).to(device), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = torch.optim.AdamW(
        network.parameters(),
        settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    x, y = (tensor.to(device) for tensor in _examples(settings, size * steps))
    order = torch.Generator().manual_seed(0)
    share = size // devices
    mine = slice(rank * share, (rank + 1) * share)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()

    def epoch() -> None:
        rows = torch.randperm(size * steps, generator=order).to(device)
        for batch in rows.reshape(steps, size):
            step(x[batch[mine]], y[batch[mine]])

    while True:
        side, units = requests.recv()
        for _ in range(units):
            if side == "step":
                step(x[mine], y[mine])
            else:
                epoch()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        requests.send(None)


# ---- inference ---------------------------------------------------------------------------------


def _predict(settings: Settings) -> dict[str, Side]:
    device = _device(settings)
    torch.set_num_threads(settings["cores"])
    network = Domains(settings).to(device).eval()

    def over(rows: int) -> Side:
        inputs = _examples(settings, rows)[0]
        outputs = np.empty((rows, settings["classes"]), np.float32)

        def run(units: int) -> None:
            with torch.inference_mode():
                for _ in range(units):
                    for start in range(0, rows, settings["batch"]):
                        cut = slice(start, start + settings["batch"])
                        outputs[cut] = network(inputs[cut].to(device)).cpu().numpy()

        return run

    return {"few": over(settings["rows"]), "all": over(settings["all_rows"])}


def _examples(settings: Settings, count: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    extent_cm = (100 * np.asarray(settings["extent"])).astype(np.int32)
    x = rng.integers(0, extent_cm, (count, 3), np.int32)
    y = rng.integers(0, settings["classes"], count, np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)


if __name__ == "__main__":
    serve(build)
