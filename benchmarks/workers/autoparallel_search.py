"""The shardings of one block of a transformer, found by meta-pytorch/autoparallel in each unit.

https://github.com/meta-pytorch/autoparallel traces the block and its gradient on fake devices and
solves an integer program. It needs no accelerator, but asks which there is: an H100, as in its own
tests. The mesh is given; the batch is split over its first axis.
"""

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.workers.serve import Settings, Side, SkippedError, serve


class Block(nn.Module):
    """Attention, then a perceptron with ReLU, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3)
            for layer in (self.q, self.k, self.v)
        )
        # Written out: the fused attention of CPUs has no sharded strategies there.
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        mixed = weights @ v
        x = x + self.out(mixed.permute(0, 2, 1, 3).flatten(-2))
        return x + self.down(torch.relu(self.up(x)))


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    try:
        from autoparallel.api import AutoParallel
    except ImportError as reason:
        raise SkippedError(
            f"the peers' Python has no autoparallel ({reason}); it is in no package index: "
            "pip install git+https://github.com/meta-pytorch/autoparallel"
        ) from None
    _fake_devices(math.prod(settings["mesh"]))
    shape = (settings["batch"], settings["tokens"], settings["width"])
    axes = ("data", "tensor")[: len(settings["mesh"])]
    mesh = init_device_mesh("cpu", tuple(settings["mesh"]), mesh_dim_names=axes)
    by_batch = (Shard(0), *[Replicate()] * (mesh.ndim - 1))

    def search(units: int) -> None:
        for _ in range(units):
            with torch.device("meta"):
                block = Block(settings["width"], settings["heads"])
            with AutoParallel(block, lambda: torch.rand(*shape), mesh) as found:
                found.add_parameter_memory_constraint(low=None, high=None)
                found.add_input_constraints([by_batch])
                found.add_output_constraints([by_batch])
                found.optimize_placement()

    search(1)  # what is imported and cached at the first time
    return {"search": search}, {"mesh": settings["mesh"]}


def _fake_devices(count: int) -> None:
    """Let it believe in H100s, and in a group of as many processes."""
    mock.patch("torch.cuda.get_device_name", return_value="H100").start()
    mock.patch("torch.cpu.get_device_name", return_value="H100", create=True).start()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)


if __name__ == "__main__":
    serve(build)
