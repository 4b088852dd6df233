"""The sorted rows of `benchmarks.sent_experts` by Tutel's layer, one process for each device.

Tutel (Hwang et al. 2022, https://arxiv.org/abs/2206.03382) sends buffers of equal room, a part of
them for each expert, and drops what does not fit. With a capacity of 0 it makes them as large as
the busiest expert of any device needs, and drops nothing. One side, `step`.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from benchmarks.workers.serve import Settings, Side, serve
from benchmarks.workers.torch_processes import Processes


def _count_bytes(sent: list[int]) -> None:
    """Add to `sent` the bytes that each all-to-all gives to other devices."""
    exchange: Callable[..., Any] = torch.distributed.all_to_all_single

    def counted(output: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        count = torch.distributed.get_world_size()
        sent.append(value.nbytes * (count - 1) // count)
        return exchange(output, value, *args, **options)

    torch.distributed.all_to_all_single = counted


def _rank(rank: int, settings: Settings) -> Callable[[Any], Any]:
    from tutel.moe import moe_layer

    devices, width = settings["devices"], settings["width"]
    arrays = dict(np.load(settings["arrays"]))
    weights = {name: torch.tensor(value) for name, value in arrays.items()}
    own = len(weights["gate"]) // devices
    layer = moe_layer(
        {"type": "top", "k": settings["choices"], "capacity_factor": settings["capacity"]},
        model_dim=width,
        experts={
            "type": "llama_ffn", "num_experts_per_device": own,
            "hidden_size_per_expert": settings["hidden"],
        },
        normalize_gate=False,
    )  # fmt: skip
    first = torch.nn.Parameter(weights["in"])
    with torch.no_grad():
        layer.gates[0].wg.weight.copy_(weights["router"].T)
        for name, parameter in zip(("gate", "up", "down"), layer.experts.parameters(), strict=True):
            parameter.copy_(weights[name][rank * own : (rank + 1) * own].reshape(-1))
    x = weights["x"].chunk(devices)[rank]
    shared = first, layer.gates[0].wg.weight
    parameters = [*shared, *layer.experts.parameters()]
    sent: list[int] = []
    _count_bytes(sent)

    def step() -> None:
        hidden = torch.tanh(x @ first)
        loss = ((hidden + layer(hidden)) ** 2).sum() / weights["x"].numel()
        gradients = torch.autograd.grad(loss, parameters)
        for gradient in gradients[: len(shared)]:
            torch.distributed.all_reduce(gradient)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= settings["rate"] * gradient

    def answer(steps: int) -> dict[str, Any]:
        sent.clear()
        started = time.process_time()
        for _ in range(steps):
            step()
        used = time.process_time() - started
        return {"processor_seconds": used, "sent": sum(sent) // steps, "in": first.tolist()}

    return answer


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    """Start the processes; a step's `processor_seconds` are those of all of them."""
    processes = Processes(_rank, settings)

    def run(steps: int) -> dict[str, Any]:
        answers = processes.ask(steps)
        return {
            "processor_seconds": sum(one["processor_seconds"] for one in answers),
            "sent": answers[0]["sent"],
            "in": answers[0]["in"],
        }

    facts = {"torch": torch.__version__, "capacity": settings["capacity"]}
    return {"step": run}, facts


if __name__ == "__main__":
    serve(build)
