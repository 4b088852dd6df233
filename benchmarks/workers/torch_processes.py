"""Processes of PyTorch, one for each device, that do together what they are asked."""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from benchmarks.workers.serve import Settings, SkippedError

Answer = Callable[[Any], Any]


class Processes:
    """One process for each device; they wait for requests in their pipes, using no core.

    **Arguments:** `rank(rank, settings) -> answer` runs in each process once they have met, and
    `answer(request)` for each request; a function of a module.
    """

    def __init__(self, rank: Callable[[int, Settings], Answer], settings: Settings) -> None:
        spawn = multiprocessing.get_context("spawn")
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        self._pipes: list[Connection] = []
        for number in range(settings["devices"]):
            here, there = spawn.Pipe()
            arguments = (rank, number, settings, there, f"file://{meeting}")
            spawn.Process(target=_process, args=arguments, daemon=True).start()
            self._pipes.append(here)

    def ask(self, request: Any) -> list[Any]:
        """The answers of all. Raises `SkippedError` where one failed."""
        for pipe in self._pipes:
            pipe.send(request)
        answers = [pipe.recv() for pipe in self._pipes]
        for failure, _ in answers:
            if failure is not None:
                raise SkippedError(f"PyTorch cannot run this here: {failure}")
        return [answer for _, answer in answers]


def _process(
    rank: Callable[[int, Settings], Answer],
    number: int,
    settings: Settings,
    requests: Connection,
    meeting: str,
) -> None:
    devices = settings["devices"]
    try:
        torch.set_num_threads(max(1, settings["cores"] // devices))
        torch.distributed.init_process_group(
            "nccl" if settings["platform"] == "gpu" else "gloo",
            init_method=meeting,
            rank=number,
            world_size=devices,
        )
        answer = rank(number, settings)
        while True:
            requests.send((None, answer(requests.recv())))
    except EOFError:  # the worker is gone
        return
    except Exception as error:
        requests.send((f"{type(error).__name__}: {error}", None))
        raise
