"""Measure the machine that JAX runs on: what one device does while all of them work.

Every timing is a compiled loop on all devices at once, so that devices that share something, as
virtual CPU devices share cores, each show what is left for them. The number of trips is an argument
of the program: the seconds of a trip are those of many trips less those of none, the median of
several rounds, in each of which every program runs once (A B C A B C ...), so that a disturbance
falls on all.

    products     x ← (x · w) · v, with x (N, d), w (d, N) and v (N, d): the smallest dim is d, of a
                 large result and of a small one. w · v is the identity, so that x neither grows nor
                 vanishes.
    traffic      x ← 0.5 · x + 1, on arrays that no cache holds
    pages        on CPU, a temporary array as large, which the system hands out anew for every call
    threads      on CPU, the same of a small x, which one thread computes
    overhead     8 and 64 kernels of (8, 8) in a trip; the difference is 56 operations
    collectives  all-reduce and collective-permute, from 4 KB to 1 MB on CPU, else to 16 MB
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plurax.analysis.machine_model import (
    CollectiveTime,
    ProductTime,
    fit_collectives,
    fit_overhead,
    fit_products,
    messages,
)
from plurax.collective import ring_bytes_sent
from plurax.distributed.global_arrays import MEASURE_IN_ONE, check_alone
from plurax.machine import Machine
from plurax.machine_fields import Level
from plurax.mesh import memory_budget, platform_of

ROUNDS = 5
SECONDS = 0.01
"""The least that the trips of one timing take together."""
DTYPES = ("float32", "bfloat16")
TRAFFIC_BYTES = 2**28
"""The size of the array that is read and written, of all CPU devices together."""
TINY, FEW, MANY = 8, 8, 64
"""The dims of kernels that only start, and how many of them are in one trip."""
SMALL = (128, 64)
"""The dims of products that one thread computes."""


Loop = Callable[[int], None]
"""A compiled loop on all devices: `loop(trips)` returns when its trips are done."""


def measure_machine(devices: Sequence[jax.Device] | None = None) -> Machine:
    """Measure devices, by default all, and return them as a machine; in less than a minute.

    Rates are those that a device has while all devices work. `flops` are for float32 and bfloat16,
    and what they lose by small dims is `half_dim`; `efficiency` is 1. The links are one level,
    `node`, of all devices. `memory` is the device's limit, or on CPU half of the host's memory
    divided by the devices.

    On a machine that does other work the numbers vary, by tens of per cent.
    """
    check_alone("plurax.analysis.measure_machine", MEASURE_IN_ONE)
    mesh = Mesh(np.array(devices or jax.devices()), ("device",))
    overhead = _overhead(mesh)
    peaks, half_dim = fit_products(_products(mesh), overhead)
    platform = platform_of(mesh) or "cpu"
    levels = []
    if mesh.size > 1:
        bandwidth, latency = fit_collectives(_collectives(mesh))
        levels = [Level("node", mesh.size, _rounded(bandwidth), _rounded(latency))]
    machine = Machine(
        name=f"{mesh.size} × {mesh.devices.flat[0].device_kind}",
        flops={dtype: _rounded(rate) for dtype, rate in peaks.items()},
        memory=memory_budget(mesh),
        memory_bandwidth=_rounded(_memory_bandwidth(mesh)),
        levels=levels,
        overhead=_rounded(overhead),
        half_dim=_rounded(half_dim),
        platform=platform,
    )
    if platform != "cpu":
        return machine
    page_bandwidth, share = _page_bandwidth(mesh), _thread_share(mesh, machine)
    return dataclasses.replace(
        machine, page_bandwidth=_rounded(page_bandwidth), thread_share=_rounded(share)
    )


def _rounded(value: float) -> float:
    """Return three digits of a measurement: it has no more."""
    return float(f"{value:.3g}")


# --- What is timed --------------------------------------------------------------------------------


def _overhead(mesh: Mesh) -> float:
    """Return the seconds that an operation takes that has next to nothing to do."""

    def kernels(x: jax.Array, *, count: int) -> jax.Array:
        for _ in range(count):
            x = x - jnp.float32(0.5) * jnp.max(x)  # the next reduction needs all of it
        return x

    counts = (FEW, MANY)
    arrays = [np.eye(TINY, dtype=np.float32)]
    cases = [_Case(functools.partial(kernels, count=n), arrays) for n in counts]
    return fit_overhead(counts, _seconds_of_a_trip(mesh, cases))


def _products(mesh: Mesh) -> list[ProductTime]:
    """Time products of each dtype by their smallest dim, in sizes that suit the devices' rate."""
    (probe,) = _seconds_of_a_trip(mesh, [_two_products("float32", 256, 256)])
    large = product_size(4 * 256**3 / probe)
    sizes = [(dtype, large // 2**k) for dtype in DTYPES for k in (0, 2, 4)]
    times = _seconds_of_a_trip(mesh, [_two_products(dtype, large, small) for dtype, small in sizes])
    return [
        ProductTime(dtype, 4.0 * large * large * small, small, 2, seconds)
        for (dtype, small), seconds in zip(sizes, times, strict=True)
    ]


def _thread_share(mesh: Mesh, machine: Machine) -> float:
    """Return the share of a product's rate on a CPU that one thread reaches."""
    large, small = SMALL
    (seconds,) = _seconds_of_a_trip(mesh, [_two_products("float32", large, small)])
    return min(1.0, machine.product_seconds(large, large, small, "float32", batch=2) / seconds)


def _two_products(dtype: str, large: int, small: int) -> "_Case":
    from scipy.linalg import hadamard

    x = np.resize(np.random.default_rng(0).standard_normal(10_007), (large, small))
    w = np.tile(hadamard(small, np.float32), large // small)
    return _Case(_there_and_back, [x, w, w.T / large], dtype)


def product_size(rate: float) -> int:
    """Return the power of 2, 256 to 8192, of which two products take about 2 ms at a rate.

    >>> product_size(1e10), product_size(2e11), product_size(5e14)
    (256, 512, 8192)
    """
    size: int = 2 ** round(math.log2(max(rate * 2e-3 / 4, 1.0)) / 3)
    return min(max(size, 256), 8192)


def _there_and_back(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    # Without the barrier w @ v, which does not change, could be computed once for all trips.
    between = lax.optimization_barrier(x @ w)
    return (between @ v).astype(x.dtype)


def _memory_bandwidth(mesh: Mesh) -> float:
    """Return the bytes per second that each device reads and writes."""
    shared = mesh.size if mesh.devices.flat[0].platform == "cpu" else 1
    size = TRAFFIC_BYTES // shared
    body = lambda x: x * jnp.float32(0.5) + jnp.float32(1)  # noqa: E731
    (seconds,) = _seconds_of_a_trip(mesh, [_Case(body, [np.zeros(size // 4, np.float32)])])
    return 2 * size / seconds


def _page_bandwidth(mesh: Mesh) -> float:
    """Return the bytes per second that a CPU's system hands out to each device, 0 if not seen.

    The first trip of a call writes a temporary array in pages that the system has yet to hand out,
    the second writes the same pages again.
    """
    size = TRAFFIC_BYTES // mesh.size

    def temporary(x: jax.Array) -> jax.Array:
        # What a loop carries is in memory; a loop of one trip would be none.
        new = jnp.broadcast_to(x, (size // 4,))
        return lax.fori_loop(0, 2, lambda _, y: y * jnp.float32(0.5), new)[:1]

    case = _Case(temporary, [np.ones(1, np.float32)])
    loop = _loop(mesh, _compiled(mesh, case), case)

    def seconds(trips: int) -> float:
        loop(trips)  # a call takes back the pages of the one before it
        return _seconds(loop, trips)

    rounds = [[seconds(trips) for trips in (0, 1, 2)] for _ in range(ROUNDS)]
    new = statistics.median(2 * one - none - two for none, one, two in rounds)
    return size / new if new > 0 else 0.0


def _collectives(mesh: Mesh) -> list[CollectiveTime]:
    """Time collectives over all devices, by kind and size."""
    count = mesh.size
    ring = [(i, (i + 1) % count) for i in range(count)]
    bodies: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all-reduce": lambda x: lax.psum(x, "device") * jnp.float32(1 / count),
        "collective-permute": lambda x: lax.ppermute(x, "device", ring),
    }
    largest = 2**20 if mesh.devices.flat[0].platform == "cpu" else 2**24
    sizes = [size for size in (2**12, 2**16, 2**20, 2**24) if size <= largest]
    sent = [(kind, size) for kind in bodies for size in sizes]
    cases = [_Case(bodies[kind], [np.ones(size // 4, np.float32)]) for kind, size in sent]
    return [
        CollectiveTime(ring_bytes_sent(kind, size, count), messages(kind, count), seconds)
        for (kind, size), seconds in zip(sent, _seconds_of_a_trip(mesh, cases), strict=True)
    ]


# --- How it is timed ------------------------------------------------------------------------------


class _Case(NamedTuple):
    """What is timed: `x = body(x, *others)`, on copies of `arrays` on every device."""

    body: Callable[..., jax.Array]
    arrays: Sequence[np.ndarray]
    dtype: str = "float32"


def _compiled(mesh: Mesh, case: _Case) -> Any:
    """Compile a loop in which every device computes a case, without running it."""
    split = PartitionSpec("device")

    def on_device(trips: jax.Array, x: jax.Array, *others: jax.Array) -> jax.Array:
        given = [other[0] for other in others]
        return lax.fori_loop(0, trips, lambda _, x: case.body(x, *given), x[0])[None]

    program = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), *[split] * len(case.arrays)),
            out_specs=split,
            check_vma=False,
        ),
        donate_argnums=1,  # or no trips at all would copy x
    )
    like = [
        jax.ShapeDtypeStruct(
            (mesh.size, *array.shape), case.dtype, sharding=NamedSharding(mesh, split)
        )
        for array in case.arrays
    ]
    return program.lower(np.int32(0), *like).compile()


def _loop(mesh: Mesh, program: Any, case: _Case) -> Loop:
    """Return a compiled loop with arrays of its own."""
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    x, *others = (
        jax.device_put(
            np.broadcast_to(array.astype(case.dtype), (mesh.size, *array.shape)), sharding
        )
        for array in case.arrays
    )

    def run(trips: int) -> None:
        nonlocal x
        x = jax.block_until_ready(program(np.int32(trips), x, *others))

    run(1)
    return run


def _seconds_of_a_trip(mesh: Mesh, cases: Sequence[_Case]) -> list[float]:
    """Return the median seconds of one trip of each case."""
    # Compilers run side by side; programs do not, since they share the devices.
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(functools.partial(_compiled, mesh), cases))
    loops = [_loop(mesh, program, case) for program, case in zip(programs, cases, strict=True)]
    timed = [(loop, _enough_trips(loop)) for loop in loops]
    rounds = [
        [(_seconds(loop, trips) - _seconds(loop, 0)) / trips for loop, trips in timed]
        for _ in range(ROUNDS)
    ]
    return [max(statistics.median(times), 1e-9) for times in zip(*rounds, strict=True)]


def _enough_trips(loop: Loop) -> int:
    """Return how many trips take long enough to be timed: a power of 2."""
    trips = 1
    while _seconds(loop, trips) - _seconds(loop, 0) < SECONDS and trips < 2**20:
        trips *= 2
    return trips


def _seconds(loop: Loop, trips: int) -> float:
    start = time.perf_counter()
    loop(trips)
    return time.perf_counter() - start
