"""What every measurement needs to know, and the processes that it starts."""

import dataclasses
import sys
from typing import Any

from benchmarks import sizes
from benchmarks.harness import Worker, WorkerSkippedError

PEERS = {
    "PyTorch DDP": "torch_peer",
    "TensorFlow MirroredStrategy": "tensorflow_peer",
    "PyTorch DDP of a transformer": "torch_divided",
    "PyTorch": "torch_peer",
    "Keras predict": "tensorflow_peer",
    "PyTorch members": "torch_members",
    "PyTorch FSDP2": "torch_divided",
    "PyTorch tensor parallel": "torch_divided",
    "PyTorch torch.compile": "torch_divided",
    "Keras ModelParallel": "keras_divided",
    "PyTorch pipelining": "torch_pipelines",
    "meta-pytorch/autoparallel": "autoparallel_search",
    "TensorFlow ParameterServerStrategy": "tensorflow_servers",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What every measurement needs to know.

    **Fields:** `peers`, the Python with PyTorch, TensorFlow and Keras, or None; `platform`, `cpu`
    or `gpu`, the same for all sides; `cores`, of the processor.
    """

    sizes: sizes.Sizes
    peers: str | None
    platform: str
    cores: int

    def jax(self, module: str, settings: dict[str, Any]) -> Worker:
        """A worker with plurax. Raises `WorkerSkippedError`."""
        return Worker(sys.executable, module, settings)

    def peer(self, name: str, settings: dict[str, Any]) -> Worker:
        """A worker with another framework. Raises `WorkerSkippedError`."""
        if self.peers is None:
            raise WorkerSkippedError("no Python with PyTorch, TensorFlow and Keras given (--peers)")
        return Worker(self.peers, PEERS[name], settings)
