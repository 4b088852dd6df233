"""Steps of training runs that others measured and published, beside what plurax estimates for them.

    python -m benchmarks.published

Each row is a model, a machine and a plan as published, in plurax's words, and estimated before any
of it is compiled. No value of a preset was set by these rows. Llama's and MPT's attention is
cuDNN's: their rows need the package (pip install 'plurax[cuda]'), and are left out without it.

What differs from the published runs: plurax' pipelines run in lockstep, `eager-1f1b` stands for
interleaved schedules, and products are in bfloat16 where `float8` says that theirs were in float8.
On TPUs attention is a kernel of Pallas in theirs, and counts as cuDNN's here. Rows with the letters
K, F and C were read when the clock was finished: how near it comes to them was not known before.

Sources, by the letter of a row:
M  Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, table 1: rates a device, all operations
   of a step counted as in its equation 3; microbatches of 1 to 8 sequences, by model
N  Smith et al. 2022, https://arxiv.org/abs/2201.11990, section 2.4: 60.1 s for a batch
T  torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: tokens a second a device, on H100s of
   96 GB with HBM2e, 2.4 TB/s and a limit of 500 W
L  Llama 3, https://arxiv.org/abs/2407.21783, table 4: rates a device, causal attention counted
X  MaxText, MaxText/configs/v5e/README.md and v5p/README.md at 0ed7bd5: rates a chip, six operations
   for each parameter and token and causal attention counted; plans are in the scripts beside it
K  Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, table 5: seconds of a step under full
   recomputation
F  MosaicML, llm-foundry, scripts/train/benchmarking/README.md at 061f2c7: tokens a second a device
   of MPT, of 2,048 and 8,192 tokens, each on as few devices as it lists
C  torchtitan, table 2 of the file of T: sequences of Llama 8B over `context`, in float8
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax

import plurax as px
from benchmarks import gpt, llama
from benchmarks.gpt import Gpt

STORED = Path(__file__).parent / "results" / "published.json"
MODELS: dict[str, Any] = {
    "8B": llama.LLAMA_8B, "70B": llama.LLAMA_70B, "405B": llama.LLAMA_405B
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A published step: `seconds` of a batch of `batch` sequences under a plan.

    `source`, the letter of the list above; `machine`, a preset of `nodes`; `other`, fields of the
    machine that differ from the preset; `float8`, whether theirs ran products in float8.
    """

    name: str
    source: str
    model: Any
    batch: int
    machine: str
    nodes: int
    plan: dict[str, Any]
    seconds: float
    other: dict[str, Any] = dataclasses.field(default_factory=dict)
    float8: bool = False

    def estimate(self) -> px.analysis.Estimate:
        """What plurax expects of it."""
        rules = gpt.MEGATRON if isinstance(self.model, Gpt) else llama.MEGATRON
        shardings = rules if self.plan.get("tensor", 1) > 1 else {}
        plan = px.Plan(precision="bfloat16", shardings=shardings, **self.plan)
        machine = px.Machine.preset(self.machine, self.nodes)
        machine = dataclasses.replace(machine, **self.other)
        batch = self.model.batch(self.batch)
        return px.estimate(self.model.task(), optax.adamw(1e-4), plan, batch, machine)


# Billions of parameters: depth, width, heads, tensor, pipeline, devices, batch, TFLOP/s a device,
# and the sequences of a microbatch.
_MEGATRON = {
    "1.7": (24, 2304, 24, 1, 1, 32, 512, 137, 8),
    "3.6": (30, 3072, 32, 2, 1, 64, 512, 138, 8),
    "7.5": (36, 4096, 32, 4, 1, 128, 512, 142, 4),
    "18.4": (40, 6144, 48, 8, 1, 256, 1024, 135, 4),
    "39.1": (48, 8192, 64, 8, 2, 512, 1536, 138, 2),
    "76.1": (60, 10240, 80, 8, 4, 1024, 1792, 140, 2),
    "145.6": (80, 12288, 96, 8, 8, 1536, 2304, 148, 2),
    "310.1": (96, 16384, 128, 8, 16, 1920, 2160, 155, 1),
    "529.6": (105, 20480, 128, 8, 35, 2520, 2520, 163, 1),
    "1008.0": (128, 25600, 160, 8, 64, 3072, 3072, 163, 1),
}


def _megatron() -> Iterator[PublishedRun]:
    for name, (depth, width, heads, tensor, pipeline, devices, batch, rate, rows) in (
        _MEGATRON.items()
    ):  # fmt: skip
        model = Gpt(depth, width, heads)
        tokens, data = model.tokens, devices // tensor // pipeline
        flops = 96 * batch * tokens * depth * width**2
        flops *= 1 + tokens / (6 * width) + model.vocabulary / (16 * depth * width)
        plan = {
            "data": data, "tensor": tensor, "pipeline": pipeline, "remat": "full",
            "microbatches": batch // data // rows,
            "schedule": "eager-1f1b" if pipeline > 1 else "1f1b",
        }  # fmt: skip
        seconds = flops / (devices * rate * 1e12)
        yield PublishedRun(
            f"GPT, {name}B", "M", model, batch, "8xA100-80GB", devices // 8, plan, seconds
        )


_LIMITED = {"memory_bandwidth": 2.4e12, "memory": 96e9}
"""What torchtitan's H100s have."""


def _others() -> Iterator[PublishedRun]:
    mt_nlg = {
        "data": 8, "tensor": 8, "pipeline": 35, "microbatches": 240, "remat": "full",
        "schedule": "eager-1f1b",
    }  # fmt: skip
    yield PublishedRun(
        "MT-NLG, 530B", "N", Gpt(105, 20480, 128), 1920, "8xA100-80GB", 280, mt_nlg, 60.1
    )
    titan: list[tuple[str, str, int, float, bool, dict[str, Any]]] = [
        ("FSDP", "8B", 16, 6667, False, {"data": 8, "zero": 3, "remat": "dots"}),
        ("FSDP", "8B", 256, 6514, False, {"data": 128, "zero": 3, "remat": "dots"}),
        ("2D", "70B", 512, 829, True, {"data": 32, "tensor": 8, "zero": 3, "remat": "full"}),
        ("3D, 1F1B", "405B", 256, 100, True, {
            "data": 8, "tensor": 8, "pipeline": 8, "microbatches": 32, "zero": 2, "remat": "full",
            "schedule": "1f1b",
        }),
    ]  # fmt: skip
    for kind, model, batch, rate, float8, plan in titan:
        devices = px.Plan(**plan).devices
        seconds = batch * MODELS[model].tokens / devices / rate
        yield PublishedRun(
            f"Llama, {model}, {kind}, {devices} devices", "T", MODELS[model], batch, "8xH100-80GB",
            devices // 8, plan, seconds, _LIMITED, float8,
        )  # fmt: skip
    for data, rate in ((64, 430), (128, 400)):
        model, batch = llama.LLAMA_405B, 2048
        # A product of two numbers for each parameter, forward and twice backward; attention.
        token = 6 * 405.9e9 + 6 * model.depth * model.tokens * model.width
        plan = {
            "data": data, "tensor": 8, "pipeline": 16, "microbatches": batch // data, "zero": 1,
            "schedule": "zb-h1",
        }  # fmt: skip
        devices = data * 128
        seconds = batch * model.tokens * token / (devices * rate * 1e12)
        yield PublishedRun(
            f"Llama, 405B, {devices} devices", "L", model, batch, "8xH100-80GB", devices // 8, plan,
            seconds,
        )  # fmt: skip


# Billions of parameters, generation of TPU, chips: depth, width, heads, hidden, rows a chip,
# tensor, remat, TFLOP/s a chip. A head is 128 wide, a vocabulary has 32,000 words.
_MAXTEXT = {
    ("16", "v5e", 256): (32, 4096, 64, 28672, 6, 1, "full", 120),
    ("32", "v5e", 256): (32, 8192, 64, 28672, 4, 1, "full", 132),
    ("64", "v5e", 256): (64, 8192, 64, 28672, 2, 1, "full", 118),
    ("32", "v5p", 64): (32, 8192, 64, 28672, 7, 4, "dots", 328),
    ("64", "v5p", 64): (64, 8192, 64, 28672, 3, 4, "dots", 323),
    ("128", "v5p", 128): (64, 8192, 128, 57344, 1, 8, "dots", 315),
    ("256", "v5p", 512): (64, 16384, 128, 57344, 1, 8, "dots", 308),
    ("512", "v5p", 512): (128, 16384, 128, 57344, 2, 8, "full", 294),
}


def _maxtext() -> Iterator[PublishedRun]:
    for (name, chip, devices), (depth, width, heads, hidden, rows, tensor, remat, rate) in (
        _MAXTEXT.items()
    ):  # fmt: skip
        model = llama.Llama(depth, width, heads, hidden, heads, 32_000, 2048, 128)
        parameters = depth * width * (4 * heads * 128 + 3 * hidden) + 2 * 32_000 * width
        token = 6 * parameters + 6 * depth * model.tokens * heads * 128
        plan = {"data": devices // tensor, "tensor": tensor, "zero": 3, "remat": remat}
        yield PublishedRun(
            f"MaxText, {name}B, {devices} {chip}", "X", model, rows * devices,
            f"{devices}xTPU-{chip}", 1, plan, rows * model.tokens * token / (rate * 1e12),
        )  # fmt: skip


# Billions of parameters: depth, width, heads, tensor, pipeline, devices, batch, microbatches, and
# seconds.
_KORTHIKANTI = {
    "22": (48, 6144, 64, 8, 1, 8, 4, 1, 1.42),
    "175": (96, 12288, 96, 8, 8, 64, 64, 64, 18.13),
    "530": (105, 20480, 128, 8, 35, 280, 280, 280, 49.05),
    "1000": (128, 25600, 160, 8, 64, 512, 512, 512, 94.42),
}


def _korthikanti() -> Iterator[PublishedRun]:
    for name, sizes in _KORTHIKANTI.items():
        depth, width, heads, tensor, pipeline, devices, batch, microbatches, seconds = sizes
        plan = {
            "tensor": tensor, "pipeline": pipeline, "microbatches": microbatches, "remat": "full",
            "schedule": "eager-1f1b" if pipeline > 1 else "1f1b",
        }  # fmt: skip
        yield PublishedRun(
            f"GPT, {name}B, {devices} devices", "K", Gpt(depth, width, heads), batch, "8xA100-80GB",
            devices // 8, plan, seconds,
        )  # fmt: skip


_MPT = {
    "125M": (12, 768, 12), "350M": (24, 1024, 16), "760M": (24, 1536, 12), "1B": (24, 2048, 16),
    "3B": (32, 2560, 20), "7B": (32, 4096, 32), "13B": (40, 5120, 40), "30B": (48, 7168, 56),
    "70B": (80, 8192, 64),
}  # fmt: skip
# Device, tokens, model: devices, rows of a device's microbatch, microbatches, whether layers are
# computed again, tokens a second a device.
_FOUNDRY = {
    ("H100", 2048): {
        "70B": (32, 2, 16, True, 882), "30B": (8, 3, 21, True, 2002),
        "13B": (8, 2, 1, False, 4792), "7B": (8, 6, 1, False, 10643),
        "3B": (16, 10, 3, False, 24142), "1B": (8, 14, 1, False, 45455),
        "760M": (8, 24, 2, False, 63147),
    },
    ("H100", 8192): {
        "30B": (8, 1, 21, True, 1384), "7B": (8, 8, 2, True, 6935),
        "3B": (8, 3, 6, False, 16578), "1B": (8, 3, 4, False, 29157),
        "760M": (8, 6, 2, False, 41825),
    },
    ("A100", 2048): {
        "70B": (32, 2, 16, True, 373), "30B": (8, 3, 21, True, 916),
        "13B": (8, 2, 3, False, 2262), "7B": (8, 6, 2, False, 4641),
        "3B": (8, 10, 2, False, 10811), "1B": (8, 14, 4, False, 20513),
        "760M": (8, 24, 2, False, 32434), "350M": (8, 32, 2, False, 58782),
        "125M": (8, 32, 2, False, 141737),
    },
    ("A100", 8192): {
        "30B": (8, 1, 21, True, 574), "13B": (8, 5, 3, True, 1795),
        "7B": (8, 8, 2, True, 3206), "3B": (8, 3, 6, False, 7695),
        "1B": (8, 3, 4, False, 13814), "760M": (8, 6, 2, False, 20933),
        "350M": (8, 8, 2, False, 36569), "125M": (8, 8, 2, False, 90392),
    },
}  # fmt: skip


def _foundry() -> Iterator[PublishedRun]:
    for (kind, tokens), models in _FOUNDRY.items():
        for name, (devices, rows, microbatches, again, rate) in models.items():
            plan = {
                "data": devices, "microbatches": microbatches, "zero": 3,
                "remat": "full" if again else "none",
            }  # fmt: skip
            yield PublishedRun(
                f"MPT, {name}, {tokens} tokens, {devices} {kind}", "F",
                Gpt(*_MPT[name], vocabulary=50368, tokens=tokens, kernel=True),
                devices * rows * microbatches, f"8x{kind}-80GB", devices // 8, plan,
                rows * microbatches * tokens / rate,
            )  # fmt: skip


def _over_context() -> Iterator[PublishedRun]:
    for context, rate in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        model = dataclasses.replace(llama.LLAMA_8B, tokens=32768 * context)
        plan = {"data": 8 // context, "context": context, "zero": 3, "remat": "full"}
        plan |= {"stream": 512} if context > 1 else {}
        yield PublishedRun(
            f"Llama, 8B, {model.tokens} tokens over {context}", "C", model, 8 // context,
            "8xH100-80GB", 1, plan, model.tokens / context / rate, _LIMITED, float8=True,
        )  # fmt: skip


def runs() -> list[PublishedRun]:
    """All rows."""
    return [
        *_megatron(), *_others(), *_maxtext(), *_korthikanti(), *_foundry(), *_over_context()
    ]  # fmt: skip


def main() -> int:
    """Print each estimate beside what is published, and how often the interval holds it."""
    argparse.ArgumentParser("python -m benchmarks.published", description=__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for run in runs():
        started = time.perf_counter()
        try:
            estimate = run.estimate()
        except RuntimeError as error:
            print(f"{run.name:36} left out: {str(error).splitlines()[0]}")
            continue
        low, high = estimate.between
        rows.append({
            "name": run.name, "source": run.source, "published": run.seconds,
            "estimated": estimate.seconds, "between": [low, high], "float8": run.float8,
            "plan": estimate.plan.sizes_text(), "peak": estimate.peak,
        })  # fmt: skip
        ratio, float8 = estimate.seconds / run.seconds, ", theirs in float8" if run.float8 else ""
        print(f"{run.source} {run.name:36} {run.seconds:7.2f} s, estimated {estimate.seconds:7.2f},"
              f" {ratio:.2f} x, {low:.2f} to {high:.2f}{float8}"
              f" ({time.perf_counter() - started:.1f} s)", flush=True)  # fmt: skip
    for name, part in (("all", rows), ("K, F and C", [r for r in rows if r["source"] in "KFC"])):
        if not part:
            continue
        errors = [abs(row["estimated"] / row["published"] - 1) for row in part]
        inside = sum(row["between"][0] <= row["published"] <= row["between"][1] for row in part)
        mean, median = statistics.mean(errors), statistics.median(errors)
        print(f"{name}: mean error {mean:.0%}, median {median:.0%}; "
              f"{inside} of {len(part)} within their interval")  # fmt: skip
    STORED.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
