"""`plurax doctor`: what a bug report should say about an installation, and what is slow in it."""

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from plurax import tree
from plurax.cli.arguments import start_devices
from plurax.cli.options import Devices
from plurax.cli.parser import parse_options
from plurax.run_folder.run_file import versions
from plurax.terminal import printable
from plurax.trace.advised_options import advised_options

SMALL_SHM = 1 << 30
"""Bytes of /dev/shm below which it is small: that of a container is 64 MB by default."""

SETTINGS = ("jax_enable_x64", "jax_disable_jit", "jax_debug_nans", "jax_debug_infs",
            "jax_default_matmul_precision", "jax_compilation_cache_dir",
            "jax_enable_compilation_cache")  # fmt: skip

ENVIRONMENT = ("XLA_", "JAX_", "PLURAX_", "CUDA_", "NCCL_", "TPU_", "OMP_", "GLIBC_")
"""How the names of the variables begin that change what is computed, or how fast."""


SHOWN = (
    "XLA_FLAGS", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_COMPILATION_CACHE_DIR", "JAX_DEBUG_INFS",
    "JAX_DEBUG_NANS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DISABLE_JIT",
    "JAX_ENABLE_COMPILATION_CACHE", "JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME", "PLURAX_ATTEMPT", "PLURAX_DEVICES", "PLURAX_ELASTIC", "PLURAX_PROCESS",
    "PLURAX_PROCESSES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "NCCL_DEBUG",
    "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND",
)  # fmt: skip
"""Variables whose values are shown: anything may be in others, such as a password or a host."""

HIDDEN = "(set)"

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Print devices, versions, what is installed and what is slow, to paste into a bug report.

    It names no users or hosts, and of variables that it does not know only the names.
    """

    devices: Annotated[Devices, tyro.conf.arg(metavar="N|cores")] = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a process and its machine.

    **Fields:** `platform` and `kinds`, of JAX's devices; `memory`, bytes of one, None where JAX
    does not say; `cores` that this process may use; `shm`, bytes of /dev/shm, None without one;
    `gpus`, GPUs of the machine, whether JAX uses them or not; `settings`, of JAX; `environment`;
    `small_pages`, whether memory comes in small pages, and could come in large ones.
    """

    platform: str
    kinds: Sequence[str]
    memory: int | None
    cores: int
    shm: int | None
    gpus: int
    settings: Mapping[str, object]
    environment: Mapping[str, str]
    small_pages: bool


def doctor_command(arguments: list[str]) -> int:
    """Print the report."""
    options = parse_options(DoctorOptions, "plurax doctor", arguments)
    start_devices([] if options.devices is None else ["--devices", options.devices])
    facts = gather()
    here = f"{platform.system()} {platform.release()} on {platform.machine()}"
    lines = ["versions:", *_pairs(versions()), *_pairs({"system": here}), "", "devices:"]
    lines += [f"  {line}" for line in devices_text(facts)]
    installed, missing = extras()
    lines += ["", "extras:", *_pairs(installed)]
    lines += [f"  not installed: {', '.join(missing)}"] if missing else []
    lines += ["", "settings:"]
    set_here = {name: value for name, value in facts.settings.items() if value is not None}
    lines += [*_pairs(set_here), *_pairs(facts.environment)]
    lines += [
        "",
        "options of the compiler (compiler_options=...):",
        *(f"  {text}" for text in advice_text(facts.kinds)),
        "",
        "slow, or surprising:",
        *(f"  - {text}" for text in findings(facts)),
    ]
    print("\n".join(map(printable, lines)))
    return 0


def gather() -> Facts:
    """Return the facts of this process; starts JAX."""
    devices = jax.local_devices()
    stats = devices[0].memory_stats() or {}
    shm = Path("/dev/shm")
    return Facts(
        platform=devices[0].platform,
        kinds=[device.device_kind for device in devices],
        memory=stats.get("bytes_limit"),
        cores=len(os.sched_getaffinity(0)),
        shm=shutil.disk_usage(shm).total if shm.is_dir() else None,
        gpus=len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()]),
        settings={name: jax.config.values.get(name) for name in SETTINGS},
        environment=shown_environment(os.environ),
        small_pages=in_small_pages(platform.libc_ver(), LARGE_PAGES, os.environ),
    )


def in_small_pages(
    library: tuple[str, str], large_pages: Path, environment: Mapping[str, str]
) -> bool:
    """Return whether memory comes in pages of 4 KiB, where the C library could ask for larger ones.

    `library`: its name and version; `large_pages`: the file in which Linux says who gets them.
    https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html
    """
    name, version = library
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    if name != "glibc" or numbers < (2, 35) or not large_pages.is_file():
        return False
    asked = "glibc.malloc.hugetlb" in environment.get("GLIBC_TUNABLES", "")
    return "[madvise]" in large_pages.read_text() and not asked


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter: of those in `SHOWN` the values, else that they are set.

    >>> shown_environment({"XLA_FLAGS": "-a", "PLURAX_TOKEN": "1234", "HOME": "/"})
    {'PLURAX_TOKEN': '(set)', 'XLA_FLAGS': '-a'}
    """
    return {
        name: value if name in SHOWN else HIDDEN
        for name, value in sorted(environment.items())
        if name.startswith(ENVIRONMENT)
    }


def devices_text(facts: Facts) -> list[str]:
    """Return lines that say which devices JAX has."""
    counts = {kind: list(facts.kinds).count(kind) for kind in dict.fromkeys(facts.kinds)}
    each = "" if facts.memory is None else f", {tree.human_bytes(facts.memory)} each for JAX"
    lines = [f"{count} × {kind} ({facts.platform}){each}" for kind, count in counts.items()]
    lines.append(f"{facts.cores} cores for this process")
    if facts.shm is not None:
        lines.append(f"/dev/shm of {tree.human_bytes(facts.shm)}")
    return lines


def advice_text(kinds: Sequence[str]) -> list[str]:
    """Return lines that say which options of the compiler help on these kinds of devices."""
    lines, known = [], advised_options()
    for kind in dict.fromkeys(kinds):
        advised = known.get(kind, {})
        lines += [f"{kind}: {name} = {one['value']}: {one['why']}" for name, one in advised.items()]
        lines += [] if advised else [f"{kind}: none is known to help"]
    return lines


def extras() -> tuple[dict[str, str], list[str]]:
    """Return the versions of the packages of extras, and the extras that are not installed."""
    installed: dict[str, str] = {}
    missing: list[str] = []
    for text in importlib.metadata.requires("plurax") or ():
        match = re.match(r"([\w.-]+)(?:\[.*?\])?.*;.*extra == [\"']([\w-]+)[\"']", text)
        if match is None or match[2] == "dev" or match[1] in ("plurax", "jax"):
            continue
        try:
            installed[match[1]] = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"plurax[{match[2]}]")
    return installed, list(dict.fromkeys(missing))


def findings(facts: Facts) -> list[str]:
    """Return what is slow or surprising, each with what to do about it."""
    texts = [*_of_devices(facts), *_of_settings(facts), *_of_memory(facts)]
    return texts or ["nothing"]


def _of_devices(facts: Facts) -> Iterator[str]:
    count = len(facts.kinds)
    if facts.platform == "cpu" and facts.gpus:
        yield (
            f"this machine has {facts.gpus} NVIDIA GPUs and JAX uses none of them: install "
            "plurax[cuda13], or plurax[cuda12] for an older driver, and unset JAX_PLATFORMS"
        )
    elif facts.platform == "cpu" and count == 1 and facts.cores > 1:
        yield (
            f"one CPU device for {facts.cores} cores: `--devices cores` and `--plan.data "
            f"{facts.cores}` use them all, often faster"
        )
    if facts.platform == "cpu" and count > facts.cores:
        yield f"{count} virtual CPU devices share {facts.cores} cores: for tests, not for speed"
    if len(set(facts.kinds)) > 1:
        yield "the devices are of several kinds, and a step waits for the slowest of them"


def _of_settings(facts: Facts) -> Iterator[str]:
    on = facts.settings
    if on.get("jax_disable_jit"):
        yield "jax_disable_jit is on: nothing is compiled, and a step takes a hundred times as long"
    if on.get("jax_debug_nans") or on.get("jax_debug_infs"):
        yield "jax_debug_nans or jax_debug_infs is on: every result is copied to the host and read"
    if on.get("jax_enable_x64"):
        yield (
            "jax_enable_x64 is on: arrays of float64 stay so, with twice the memory, and on most "
            "GPUs a small part of the speed"
        )
    if on.get("jax_default_matmul_precision") in ("highest", "float32") and facts.platform != "cpu":
        yield "jax_default_matmul_precision keeps matrix products off the fast units of the device"
    if not (on.get("jax_compilation_cache_dir") and on.get("jax_enable_compilation_cache", True)):
        yield (
            "nothing that is compiled is kept: JAX_COMPILATION_CACHE_DIR=~/.cache/jax saves the "
            "time of compiling from the second start on"
        )
    if "--xla_force_host_platform_device_count" in facts.environment.get("XLA_FLAGS", ""):
        yield "XLA_FLAGS sets the number of CPU devices; `--devices` does so without it"


def _of_memory(facts: Facts) -> Iterator[str]:
    preallocate = facts.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    if facts.platform == "gpu" and preallocate in ("false", "0"):
        yield (
            "XLA_PYTHON_CLIENT_PREALLOCATE is off: memory is asked for piece by piece, slower, and "
            "may break into pieces too small to use"
        )
    elif facts.platform == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in facts.environment:
        yield (
            "JAX takes three quarters of a GPU's memory at its start: "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 gives it more, and two processes on one GPU need "
            "less each"
        )
    if facts.platform == "cpu" and facts.small_pages:
        yield (
            "memory comes in pages of 4 KiB, and XLA asks for that of a step in every step: "
            "GLIBC_TUNABLES=glibc.malloc.hugetlb=1, set before Python starts, makes them large, "
            "and steps that hold hundreds of megabytes up to a quarter shorter"
        )
    if facts.shm is not None and facts.shm < SMALL_SHM:
        yield (
            f"/dev/shm has {tree.human_bytes(facts.shm)}: loaders with several processes and "
            "parameter servers pass arrays through it; of a container --shm-size sets it"
        )


def _pairs(values: Mapping[str, object]) -> list[str]:
    return [f"  {name}: {value}" for name, value in values.items()]
