"""Devices of a machine that is not here, to compile for.

XLA's compilers for TPUs and GPUs run on any machine. They need the package of the device, not the
device, and a description of what they compile for:

    topology("v5p:4x4x4")     64 chips in a torus; libtpu knows the kinds
    topology("v6e:4x4*2")     two slices of 16, joined by the network
    topology("8xH100-80GB")   one node of eight; what a kind is stands in `presets.toml`
    topology("2x8xB200")      two nodes of eight

The devices that this returns have no memory: a program for them is compiled, read and never run.

Source: JAX's documentation, "Ahead-of-time lowering and compilation", and `GpuTargetConfigProto` of
XLA, whose text form `_gpu_description` writes.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax

from plurax import errors
from plurax.machine import Machine, published

_PACKAGES = {
    "tpu": ("tpu", ("libtpu",)),
    "cuda": ("cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin")),
}
"""For each platform the extra of plurax that brings its compiler, and the modules that have it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to compile for.

    **Fields:** `name`, as it was given; `machine`, with its rates, memory and links; `compiler`,
    what the compiler has to know of a device, from `presets.toml`; `shape`, chips along each axis
    of a TPU's torus, or nodes and devices of a node; `slices` of a TPU.
    """

    name: str
    machine: Machine
    compiler: Mapping[str, Any] = dataclasses.field(hash=False)
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def clock(self) -> float | None:
        """The cycles per second of the compiler's estimates; None where it makes none."""
        clock: float | None = self.compiler.get("clock")
        return clock

    @classmethod
    def of(cls, name: str) -> "Target":
        """Return the machine of a name. Raises `MachineError`, which lists the names."""
        tpu = re.fullmatch(r"(?:TPU-)?(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?", name)
        gpu = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z][\w-]*)", name)
        if tpu:
            kind = _kind_of(name, f"TPU-{tpu[1].removeprefix('tpu')}", "tpu")
            shape, slices = tuple(map(int, tpu[2].split("x"))), int(tpu[3] or 1)
            compiler = published()[kind]["compiler"]
            cores = compiler.get("devices_of_a_chip", 1)
            machine = Machine.preset(f"{math.prod(shape) * cores}x{kind}", slices)
            return cls(name, machine, compiler, shape, slices)
        if gpu:
            kind = _kind_of(name, gpu[3], "cuda")
            shape = int(gpu[1] or 1), int(gpu[2] or 1)
            machine = Machine.preset(f"{shape[1]}x{kind}", shape[0])
            return cls(name, machine, published()[kind]["compiler"], shape)
        raise _unknown(name)

    def devices(self) -> list[jax.Device]:
        """Return the devices. Raises `MissingPackageError` without the compiler's package."""
        platform = self.compiler["platform"]
        extra, modules = _PACKAGES[platform]
        if not any(importlib.util.find_spec(module) for module in modules):
            raise errors.MissingPackageError(
                f"compiling for {self.name} needs the package of its compiler, {modules[0]}, which "
                f"is not installed. No such device is needed: pip install 'plurax[{extra}]'. With "
                "JAX_PLATFORMS=cpu JAX then still runs on this machine's CPU."
            )
        return self._tpus() if platform == "tpu" else self._gpus()

    def _tpus(self) -> list[jax.Device]:
        # Otherwise libtpu asks the cloud which TPU this machine has, and waits; and only the first
        # process may load it.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        options = dict(self.compiler.get("options", {}))
        if self.slices > 1:
            options["num_slices"] = self.slices
        name = f"{self.compiler['topology']}:{'x'.join(map(str, self.shape))}"
        return self._described(name, "tpu", options)

    def _gpus(self) -> list[jax.Device]:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        nodes, count = self.shape
        options = {"target_config": _gpu_description(self), "topology": f"1x{nodes}x{count}"}
        return self._described(self.name, "cuda", options)

    def _described(self, name: str, platform: str, options: Mapping[str, Any]) -> list[jax.Device]:
        from jax.experimental import topologies

        try:
            return list(topologies.get_topology_desc(name, platform, **options).devices)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            hint = ""
            if "divisible" in reason:
                hint = " Axes are multiples of a host's, 2x2 chips: v5e:4x4, v5p:2x2x4."
            raise errors.MachineError(
                f"the compiler for {self.name} cannot describe it: {reason}.{hint}"
            ) from None


def topology(name: str) -> list[jax.Device]:
    """Return the devices of a machine that is not here, to compile for.

    **Arguments:**

    - `name`: of TPUs the kind and the chips along each axis of the torus, `v5p:4x4x4`, and `*2` for
      two slices; of GPUs `H100-80GB`, `8xH100-80GB`, `2x8xH100-80GB` for two nodes of eight. The
      memory may be left out where one kind has the name: `8xH100`.

    **Returns:** devices for `px.compile(devices=...)`. What is compiled for them can be read
    (`program.memory()`, `program.collectives()`, `plurax.analysis.compiled_step`), and not run.

    Raises `MachineError` for a machine that is not known, and `MissingPackageError` where its
    compiler is not installed.
    """
    return Target.of(name).devices()


def memory_of(device: jax.Device) -> int:
    """Return the bytes that a device of `topology` has, by what it is called."""
    kinds = published().values()
    return next(
        int(kind["memory"])
        for kind in kinds
        if kind.get("compiler", {}).get("description") == device.device_kind
    )


def targets() -> list[str]:
    """Return examples of the names that `topology` takes, one for each kind of device."""
    examples = []
    for kind, device in published().items():
        platform = device.get("compiler", {}).get("platform")
        if platform == "tpu":
            flat = len(device["node"]) > 1  # a torus of rows and columns
            examples.append(f"{kind.removeprefix('TPU-')}:{'4x4' if flat else '2x2x4'}")
        elif platform:
            examples.append(f"8x{kind}")
    return examples


def _kind_of(name: str, kind: str, platform: str) -> str:
    """Return the published kind of device that is meant. Raises `MachineError`."""
    kinds = [
        one for one, device in published().items()
        if device.get("compiler", {}).get("platform") == platform
    ]  # fmt: skip
    meant = [one for one in kinds if one == kind] or [
        one for one in kinds if one.startswith(f"{kind}-")
    ]
    other = [one for one in published() if one == kind or one.partition("-")[0] == kind]
    if other and not meant:
        raise _not_described(name, other[0])
    if len(meant) > 1:
        raise errors.MachineError(
            f"{name!r} may mean {' or '.join(meant)}: write the memory too, "
            f"{name.replace(kind, meant[0])!r}."
        )
    if not meant:
        raise _unknown(name)
    return meant[0]


def _not_described(name: str, kind: str) -> errors.MachineError:
    return errors.MachineError(
        f"{name!r}: of a {kind} plurax knows rates and links, and not what XLA's compiler has to "
        "know to compile for it on another machine. Where such devices are, px.compile compiles "
        f"for them; anywhere, px.estimate(..., px.Machine.preset('8x{kind}')) says what a step "
        f"costs. There are descriptions of {', '.join(targets())}."
    )


def _unknown(name: str) -> errors.MachineError:
    return errors.MachineError(
        f"there is no machine {name!r} to compile for. TPUs are named by their kind and the chips "
        f"along each axis, GPUs by how many of a kind a node has: {', '.join(targets())}; two "
        "slices are v5e:4x4*2, two nodes 2x8xH100-80GB."
    )


def _gpu_description(target: Target) -> str:
    """Return what XLA has to know of a GPU, as text of its `GpuTargetConfigProto`."""
    device = target.compiler
    limits: Mapping[str, Any] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "shared_memory_per_block": 48 * 1024,
        # Of what a core has, a kibibyte is the system's.
        "shared_memory_per_block_optin": device["shared_memory_per_core"] - 1024,
        "memory_bandwidth": int(target.machine.memory_bandwidth),
    }
    own = ("core_count", "fpus_per_core", "shared_memory_per_core", "l2_cache_size",
           "clock_rate_ghz", "device_memory_size")  # fmt: skip
    lines = [f"{name}: {value}" for name, value in limits.items()]
    lines += [f"{name}: {device[name]}" for name in own]
    lines.append(f"cuda_compute_capability {{ major: {device['cuda_compute_capability']} }}")
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            "}",
            'platform_name: "CUDA"',
            "runtime_version { major: 12 minor: 8 }",
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{device["description"]}"',
        ]
    )
