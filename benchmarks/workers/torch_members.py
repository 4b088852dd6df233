"""Populations of small networks in PyTorch: one after another, and all at once with `torch.func`.

For each number of networks K of `settings["counts"]` the sides `loop, K`, of at most
`settings["sample"]` networks where K is above `settings["limit"]`, and `torch.func, K`.
"""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from benchmarks.workers.serve import Settings, Side, SkippedError, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    on_gpu = settings["platform"] == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise SkippedError("this PyTorch sees no GPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    stored = {name: torch.from_numpy(leaf) for name, leaf in np.load(settings["data"]).items()}
    x, y = stored["x"].to(device), stored["y"].long().to(device)
    rows = stored["rows"].long().to(device) if "rows" in stored else None

    sides: dict[str, Side] = {}
    facts: dict[str, Any] = {"threads": torch.get_num_threads(), "looped": {}}
    for count in settings["counts"]:
        looped = min(count, settings["sample"]) if count > settings["limit"] else count
        networks = [_network(settings["widths"]).to(device) for _ in range(count)]
        mine = None if rows is None else rows[:count]
        sides[f"loop, {count}"] = _loop(settings, networks[:looped], x, y, mine)
        sides[f"torch.func, {count}"] = _at_once(settings, networks, x, y, mine)
        facts["looped"][str(count)] = looped
    facts["parameters"] = sum(p.numel() for p in networks[0].parameters())
    return sides, facts


def _network(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dense(nn.Module):
    """`nn.Linear` as `torch.addmm`, which under `vmap` is faster."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.contiguous())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def _dense(network: nn.Sequential) -> nn.Sequential:
    layers = (Dense(layer) if isinstance(layer, nn.Linear) else layer for layer in network)
    return nn.Sequential(*layers)


def _loop(
    settings: Settings, networks: list[nn.Sequential], x: Tensor, y: Tensor, rows: Tensor | None
) -> Side:
    """One network after another, each with an optimizer of its own."""
    optimizers = [_adam(settings, list(network.parameters())) for network in networks]

    def run(units: int) -> None:
        for _ in range(units):
            for i, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
                for t in range(settings["steps"]):
                    xs, ys = (x, y) if rows is None else (x[rows[i, t]], y[rows[i, t]])
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(network(xs), ys).backward()
                    optimizer.step()
        _wait(x)

    return run


def _at_once(
    settings: Settings, networks: list[nn.Sequential], x: Tensor, y: Tensor, rows: Tensor | None
) -> Side:
    """Gradients of all networks from one `vmap`, and one optimizer of the stacked parameters."""
    params, _ = stack_module_state([_dense(network) for network in networks])
    template = _dense(_network(settings["widths"])).to("meta")
    optimizer = _adam(settings, list(params.values()))
    # The same memory, without the graph that autograd would make around `grad`.
    values = {name: parameter.detach() for name, parameter in params.items()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(template, params, (x,)), y)

    where = None if rows is None else 0
    gradients = vmap(grad_and_value(loss), in_dims=(0, where, where))

    def run(units: int) -> None:
        for _ in range(units):
            for t in range(settings["steps"]):
                xs, ys = (x, y) if rows is None else (x[rows[:, t]], y[rows[:, t]])
                grads, _ = gradients(values, xs, ys)
                for name, parameter in params.items():
                    parameter.grad = grads[name]
                optimizer.step()
        _wait(x)

    return run


def _adam(settings: Settings, params: list[Tensor]) -> torch.optim.Adam:
    return torch.optim.Adam(params, settings["learning_rate"], fused=True)


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    serve(build)
