"""The transformer of `examples/language_model.py` in PyTorch, split over processes.

`settings["way"]` is `data` (`DistributedDataParallel`), `fsdp` (`fully_shard` of every block),
`tensor` (`parallelize_module`, the loss
on shards of the vocabulary) or `compiled` (one GPU, `torch.compile`, bfloat16). One side, `step`.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workers.serve import Settings, Side, SkippedError, serve
from benchmarks.workers.torch_processes import Processes

BYTES = 256
DROPOUT = 0.1
CLIP = 1.0


class Block(nn.Module):
    """Causal attention, then a perceptron with a squared ReLU; each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        # Rows by head, so that a shard of them holds queries, keys and values of its heads.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.RMSNorm(width, eps=1e-6)
        self.perceptron_in = nn.Linear(width, 4 * width, bias=False)
        self.perceptron_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        mixed = self.query_key_value(self.attention_norm(x))
        heads = mixed.view(batch, tokens, -1, 3, self.size).permute(3, 0, 2, 1, 4)
        q, k, v = heads.unbind(0)
        looked = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        added = self.attention_out(looked.transpose(1, 2).reshape(batch, tokens, -1))
        x = x + nn.functional.dropout(added, DROPOUT, self.training)
        hidden = torch.square(torch.relu(self.perceptron_in(self.perceptron_norm(x))))
        return x + nn.functional.dropout(self.perceptron_out(hidden), DROPOUT, self.training)


class Transformer(nn.Module):
    """The network of the example, layer for layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings["width"]
        # In bfloat16 what goes from layer to layer too, as in plurax; autocast alone leaves it.
        self.dtype = torch.bfloat16 if settings["way"] == "compiled" else torch.float32
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.randn(settings["window"], width))
        blocks = (Block(width, settings["heads"]) for _ in range(settings["depth"]))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.output = nn.Linear(width, BYTES, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, text: Tensor) -> Tensor:
        x = (self.embedding(text) + self.position).to(self.dtype)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    on_gpu = settings["platform"] == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise SkippedError("this PyTorch sees no GPU")
    if on_gpu and torch.cuda.device_count() < settings["devices"]:
        raise SkippedError(f"needs {settings['devices']} GPUs")
    parameters = sum(p.numel() for p in Transformer(settings).parameters())
    if settings["way"] == "compiled":
        side, loss = _compiled(settings)
        return {"step": side}, {"parameters": parameters, "first_loss": loss}
    side, loss = _processes(settings)
    return {"step": side}, {"parameters": parameters, "first_loss": loss}


# ---- one GPU -----------------------------------------------------------------------------------


def _compiled(settings: Settings) -> tuple[Side, float]:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    # As in plurax: products of float32 that remain may be rounded.
    torch.set_float32_matmul_precision("high")
    network = torch.compile(Transformer(settings).to(device))
    optimizer = _adamw(settings, [{"params": list(network.parameters())}])
    text, after = (part.to(device) for part in _examples(settings))

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = network(text)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), after.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP, foreach=True)
        optimizer.step()
        return loss.detach()

    def run(units: int) -> None:
        for _ in range(units):
            step()
        torch.cuda.synchronize(device)

    return run, float(step())


# ---- several processes -------------------------------------------------------------------------


def _processes(settings: Settings) -> tuple[Side, float]:
    processes = Processes(_rank, settings)
    return processes.ask, float(np.mean(processes.ask(1)))


def _rank(rank: int, settings: Settings) -> Callable[[int], float]:
    """One of them: so many steps, and the loss of the last."""
    devices, on_gpu = settings["devices"], settings["platform"] == "gpu"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (devices,))
    torch.manual_seed(0)
    network = Transformer(settings).to(device)
    module: nn.Module = network
    if settings["way"] == "data":
        module = DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True)
    else:
        way = {"fsdp": _fully_shard, "tensor": _parallelize}[settings["way"]]
        way(network, mesh)
    # Tensors of one kind share a fused update.
    split = [p for p in network.parameters() if isinstance(p, DTensor)]
    whole = [p for p in network.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": group} for group in (split, whole) if group]
    optimizer = _adamw(settings, groups)

    text, after = (part.to(device) for part in _examples(settings))
    on_shards: Callable[[], Any] = contextlib.nullcontext
    if settings["way"] in ("data", "fsdp"):
        share = len(text) // devices
        mine = slice(rank * share, (rank + 1) * share)
        text, after = text[mine], after[mine]
    else:
        on_shards = loss_parallel

    def step() -> Tensor:
        optimizer.zero_grad()
        with on_shards():
            loss = nn.functional.cross_entropy(module(text).flatten(0, 1), after.flatten())
            loss.backward()
        _clip(split, whole)
        optimizer.step()
        return loss.detach()

    def answer(units: int) -> float:
        for _ in range(units):
            loss = step()
        if on_gpu:
            torch.cuda.synchronize(device)
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return answer


def _fully_shard(network: Transformer, mesh: DeviceMesh) -> None:
    """Parameters, gradients and optimizer in shards, gathered block by block."""
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    # Gathered for the forward pass, the last layers are kept for the backward pass.
    fully_shard(network, mesh=mesh, reshard_after_forward=False)


def _parallelize(network: Transformer, mesh: DeviceMesh) -> None:
    """Heads, hidden units and the vocabulary of the head over processes."""
    plan: dict[str, Any] = {}
    for place in range(len(network.blocks)):
        plan |= {
            f"blocks.{place}.query_key_value": ColwiseParallel(),
            f"blocks.{place}.attention_out": RowwiseParallel(),
            f"blocks.{place}.perceptron_in": ColwiseParallel(),
            f"blocks.{place}.perceptron_out": RowwiseParallel(),
        }
    head = ColwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(network, mesh, plan | {"output": head})


def _clip(split: list[nn.Parameter], whole: list[nn.Parameter]) -> None:
    """Gradients by their global norm: `clip_grad_norm_` takes no mixture of the two kinds."""
    if not whole or not split:
        nn.utils.clip_grad_norm_(split or whole, CLIP, foreach=True)
        return
    shards = [p.grad.to_local() for p in split]  # type: ignore[union-attr]
    others = [p.grad for p in whole]
    square = torch.stack(torch._foreach_norm(shards)).square().sum()
    torch.distributed.all_reduce(square)
    square += torch.stack(torch._foreach_norm(others)).square().sum()
    factor = torch.clamp(CLIP / (square.sqrt() + 1e-6), max=1.0)
    torch._foreach_mul_([*shards, *others], factor)


def _adamw(settings: Settings, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        settings["learning_rate"],
        betas=(0.9, 0.95),
        weight_decay=settings["weight_decay"],
        fused=True,
    )


def _examples(settings: Settings) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    windows = rng.integers(0, BYTES, (settings["batch"], settings["window"] + 1), np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


if __name__ == "__main__":
    serve(build)
