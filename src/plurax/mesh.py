"""Build the mesh of a plan from devices, and create virtual CPU devices for rehearsal."""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from plurax import errors
from plurax.distributed.compilation_cache import check_cache, make_cache_safe
from plurax.distributed.global_arrays import is_absent, least, own_devices
from plurax.plan import MESH_AXES, Plan
from plurax.targets import memory_of
from plurax.validate import whole_number


def make_mesh(plan: Plan, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the plan's mesh over the first devices it needs (default: of `jax.devices()`).

    Of several processes each gives equally many. The last axes of the mesh are within a process and
    the first ones across: `tensor`, which communicates most, leaves a host only where it has to.
    Raises `PlanError` where there are too few devices, or too few for some of the processes, and
    where several CPU devices would share JAX's compilation cache (`distributed.compilation_cache`).
    """
    devices = jax.devices() if devices is None else list(devices)
    plan.check_devices(len(devices))
    devices = _of_each_process(plan, devices)
    if plan.devices > 1 and devices[0].platform == "cpu":
        check_cache()
    grid = _grid([plan.axes[axis] for axis in MESH_AXES], devices)
    # Auto axes: where a function is not manual over an axis, XLA's partitioner decides.
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(plan: Plan, platform: str | None = None) -> Any:
    """Return the plan's mesh without devices, or with devices of which only the platform is known.

    Typed Any: it takes the place of a `Mesh`, of which tracing reads only the axes.
    """
    sizes = tuple(plan.axes[axis] for axis in MESH_AXES)
    device = None if platform is None else AbstractDevice(platform, None, platform)
    return AbstractMesh(sizes, MESH_AXES, (AxisType.Auto,) * len(sizes), abstract_device=device)


def platform_of(mesh: Mesh | AbstractMesh) -> str | None:
    """Return the platform of a mesh's devices, `cpu`, `gpu` or `tpu`; None if it is not known."""
    if isinstance(mesh, Mesh):
        return str(mesh.devices.flat[0].platform)
    return mesh.abstract_device.platform if mesh.abstract_device else None


def on_accelerator(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh are known to be TPUs or GPUs."""
    return platform_of(mesh) not in (None, "cpu")


def _grid(shape: list[int], devices: list[jax.Device]) -> np.ndarray:
    """Return the devices in the shape of a mesh, neighbours on fast links next to each other.

    The first axes go across the processes as far as they divide, so that the last ones stay within:
    `(data=4, tensor=2)` on two processes with four devices is `(2, 1)` processes of `(2, 2)`.
    """
    across, rest = [], len({device.process_index for device in devices})
    for size in shape:
        across.append(math.gcd(size, rest))
        rest //= across[-1]
    if rest > 1:  # 12 devices as (data=4, tensor=3) on six processes
        return np.asarray(devices).reshape(shape)
    within = [size // processes for size, processes in zip(shape, across, strict=True)]
    found: np.ndarray = mesh_utils.create_hybrid_device_mesh(
        within, across, devices, process_is_granule=True, allow_split_physical_axes=True
    )
    return found


def _of_each_process(plan: Plan, devices: list[jax.Device]) -> list[jax.Device]:
    """Return the devices for a plan, equally many of each process, process by process."""
    owned: dict[int, list[jax.Device]] = {}
    for device in devices:
        owned.setdefault(device.process_index, []).append(device)
    share, rest = divmod(plan.devices, len(owned))
    if rest or any(len(each) < share for each in owned.values()):
        raise errors.PlanError(
            f"{plan.sizes_text()} uses {plan.devices} devices, which {len(owned)} processes cannot "
            f"share equally. Every process has to take part: use a multiple of {len(owned)} "
            "devices, or fewer processes."
        )
    return [device for _, each in sorted(owned.items()) for device in each[:share]]


def within(mesh: Mesh, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun`, traced inside the mesh, so that a `jax.shard_map` in a model finds its axes."""

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fun(*args)

    return traced


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that are whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays whose leading dim is split over the mesh axis `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))


def virtual_devices(count: int) -> None:
    """Make `count` virtual CPU devices visible to this process, to rehearse a plan on any machine.

    Call it before the first use of JAX. Raises `PlanError` where it is too late, and for a count
    that is not positive, or above 4,096.
    """
    number = whole_number(count)
    if number is None:
        raise errors.PlanError(
            f"{count!r} virtual devices: give a whole number of at least 1, as in "
            "plurax.virtual_devices(8), or --devices 8 on the command line."
        )
    if number > 4096:
        raise errors.PlanError(
            f"{number:,} virtual devices: each takes threads of this machine; give at most "
            "4,096. plurax.search and plurax.estimate plan for more without devices."
        )
    try:
        jax.config.update("jax_num_cpu_devices", number)
        jax.config.update("jax_platforms", "cpu")
        make_cache_safe()
    except RuntimeError:
        if len(jax.devices()) != number:
            raise errors.PlanError(
                f"virtual_devices({count}) came too late: JAX already runs with "
                f"{len(jax.devices())} device(s) and cannot change their number. Call it before "
                "the first array, random key or jax.devices() of the process."
            ) from None


def cpu_devices(count: int) -> None:
    """Split the CPU into `count` devices if JAX runs on it; call it before the first use of JAX."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
        make_cache_safe()


def memory_budget(mesh: Mesh) -> int:
    """Return the bytes a program may use on each device of a mesh.

    This is the limit that the device reports, and the memory of one that is not here. Where it
    reports none (CPU): half of the machine's memory, divided by the devices of this process in the
    mesh, which share it; processes on one machine do not know of each other, and each counts the
    same half. Of several processes it is the smallest.
    """
    own = own_devices(mesh.devices.flat)
    if is_absent(own[0]):
        return memory_of(own[0])
    stats = own[0].memory_stats() or {}
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return least(int(stats.get("bytes_limit", physical // 2 // len(own))))
