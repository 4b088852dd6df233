"""The stack of layers in PyTorch, in a pipeline: `torch.distributed.pipelining` over gloo.

A process for each device, with the stages that plurax gives the device. One side, `step`: forward,
backward and the update. The schedule `zb-h1` is the zero-bubble one with one stage on each device.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from benchmarks import sizes, values
from benchmarks.workers.resident import growth
from benchmarks.workers.serve import Settings, Side, serve
from benchmarks.workers.torch_processes import Processes

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
}
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}
OF_ONE_STAGE = ("gpipe", "1f1b")
"""Which of PyTorch's schedules are given a stage and not a list."""
TRIALS = 2

Params = dict[str, Any]


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    # Threads that wait shall leave the cores to other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    processes = Processes(_rank, settings)
    losses = processes.ask(("losses", None))[-1]
    resident = processes.ask(("resident", None))
    taken: dict[int, float] = {}
    cores = settings["cores"]
    for threads in sorted({1, max(1, cores // settings["devices"]), cores}):
        processes.ask(("threads", threads))
        processes.ask(("step", 1))
        begun = time.perf_counter()
        processes.ask(("step", TRIALS))
        taken[threads] = (time.perf_counter() - begun) / TRIALS
    threads = min(taken, key=lambda count: taken[count])
    processes.ask(("threads", threads))
    facts = {
        "losses": losses,
        "resident": resident,
        "threads": threads,
        "seconds_by_threads": taken,
        "parameters": sum(processes.ask(("parameters", None))),
    }
    return {"step": lambda units: processes.ask(("step", units))}, facts


# ---- one process -------------------------------------------------------------------------------


def _rank(rank: int, settings: Settings) -> Callable[[tuple[str, Any]], Any]:
    network = sizes.from_json(settings["network"])
    assert isinstance(network, sizes.Transformer)
    params = values.params(network)
    torch.set_num_threads(1)
    make = functools.partial(StageParams, rank, settings, network, params)
    trained = make()
    losses = trained.steps(2)

    def new() -> StageParams:
        other = make()
        other.steps(2)
        return other

    def answer(request: tuple[str, Any]) -> Any:
        name, value = request
        match name:
            case "losses":
                return losses
            case "resident":
                return growth(new)
            case "threads":
                return torch.set_num_threads(value)
            case "parameters":
                return sum(p.numel() for p in trained.stages.parameters())
        return trained.steps(value)

    return answer


class StageParams:
    """The stages of one process, their optimizer and schedule."""

    def __init__(
        self, rank: int, settings: Settings, network: sizes.Transformer, params: Params
    ) -> None:
        devices, name = settings["devices"], settings["schedule"]
        count = devices * CHUNKS[name]
        self.first, self.last = rank == 0, rank == devices - 1
        numbers = range(rank, count, devices)
        self.stages = nn.ModuleList(Stage(number, count, network, params) for number in numbers)
        staged = [
            pipelining.PipelineStage(stage, number, count, torch.device("cpu"))
            for number, stage in zip(numbers, self.stages, strict=True)
        ]
        self.schedule = SCHEDULES[name](
            staged[0] if name in OF_ONE_STAGE else staged,
            n_microbatches=settings["microbatches"],
            loss_fn=_loss,
        )
        self.optimizer = torch.optim.AdamW(
            self.stages.parameters(),
            settings["learning_rate"],
            weight_decay=settings["weight_decay"],
            fused=True,
        )
        tokens = torch.from_numpy(values.tokens(network, settings["batch"])).long()
        self.text, self.after = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def steps(self, count: int) -> list[float]:
        """So many updates; the losses, where this process has the head."""
        found = []
        for _ in range(count):
            losses: list[Tensor] = []
            self.optimizer.zero_grad()
            texts = (self.text,) if self.first else ()
            wanted = {"target": self.after, "losses": losses} if self.last else {}
            self.schedule.step(*texts, **wanted)
            self.optimizer.step()
            if self.last:
                found.append(float(torch.stack(losses).detach().mean()))
        return found


def _loss(logits: Tensor, after: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), after.flatten())


# ---- the network -------------------------------------------------------------------------------


class Stage(nn.Module):
    """Some layers, with the embedding before the first and the head behind the last."""

    def __init__(self, number: int, count: int, network: sizes.Transformer, params: Params) -> None:
        super().__init__()
        assert network.layers % count == 0, (network, count)
        share = network.layers // count
        self.embedding = self.output = None
        if number == 0:
            table = torch.from_numpy(params["embed"]["embedding"].copy())
            self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
        self.blocks = nn.ModuleList(
            Block(network, {name: stacked[layer] for name, stacked in params["blocks"].items()})
            for layer in range(number * share, (number + 1) * share)
        )
        if number == count - 1:
            self.output = _linear(params["head"]["output"])

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.output is None else self.output(_normalize(x))


class Block(nn.Module):
    """Causal attention, then a perceptron; each of its input normalized."""

    def __init__(self, network: sizes.Transformer, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.heads = network.heads
        for name, weight in weights.items():
            setattr(self, name, _linear(weight))

    def forward(self, x: Tensor) -> Tensor:
        y = _normalize(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(_normalize(x)), approximate="tanh"))


def _linear(weight: np.ndarray) -> nn.Linear:
    """A layer with the weight given as `(in, out)`."""
    layer = nn.Linear(*weight.shape, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight.T.copy()))
    return layer


def _normalize(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


if __name__ == "__main__":
    serve(build)
