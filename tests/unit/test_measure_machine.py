"""This machine, measured: fits on timings that are given, a clock that is ours, real programs."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

import plurax as px
from plurax.analysis import machine_timings
from plurax.analysis.machine_model import (
    CollectiveTime,
    ProductTime,
    fit_collectives,
    fit_overhead,
    fit_products,
    messages,
)
from plurax.collective import ring_bytes_sent
from plurax.machine import Machine
from plurax.machine_fields import Level

WANTED = Machine(
    "8 × cpu", {"float32": 2e10, "bfloat16": 5e10}, 10**9, 3e9, (Level("node", 8, 5e8, 3e-5),),
    overhead=2e-6, half_dim=24, page_bandwidth=4e9,
)  # fmt: skip


def product_times(dtype, noise=lambda _: 1.0):
    for dim in (16, 32, 64, 128, 256):
        seconds = WANTED.product_seconds(256, 256, dim, dtype, batch=2) + 2 * WANTED.overhead
        yield ProductTime(dtype, 4 * 256 * 256 * dim, dim, 2, seconds * noise(dim))


def collective_times(noise=lambda _: 1.0):
    for kind in ("all-reduce", "all-to-all", "collective-permute"):
        for size in (2**12, 2**16, 2**20):
            sent = ring_bytes_sent(kind, size, 8)
            seconds = WANTED.collective_seconds(kind, sent, 8) * noise(size)
            yield CollectiveTime(sent, messages(kind, 8), seconds)


def test_the_model_is_found_from_its_own_seconds():
    times = [*product_times("float32"), *product_times("bfloat16")]
    peaks, half_dim = fit_products(times, WANTED.overhead)
    assert peaks == pytest.approx(WANTED.flops)
    assert half_dim == pytest.approx(24)
    assert fit_collectives([*collective_times()]) == pytest.approx((5e8, 3e-5))
    assert fit_overhead([8, 64], [1e-5 + 8e-6, 1e-5 + 64e-6]) == pytest.approx(1e-6)


def test_noise_of_a_tenth_moves_the_fit_by_no_more_than_a_fifth():
    draws = np.random.default_rng(0)
    noise = lambda _: draws.uniform(0.9, 1.1)  # noqa: E731
    for _ in range(20):
        peaks, _ = fit_products([*product_times("float32", noise)], WANTED.overhead)
        assert peaks["float32"] == pytest.approx(2e10, rel=0.2)
        bandwidth, latency = fit_collectives([*collective_times(noise)])
        assert (bandwidth, latency) == pytest.approx((5e8, 3e-5), rel=0.2)


def test_a_fit_is_never_negative():
    """Small products that are faster than large ones, links whose time does not grow with bytes."""
    fast = [ProductTime("float32", 1e6 * dim, dim, 2, 1e-6 * dim**1.2) for dim in (16, 64, 256)]
    peaks, half_dim = fit_products(fast, overhead=1.0)
    assert half_dim == 0
    assert 1e11 < peaks["float32"] < 1e13
    slow = [ProductTime("float32", 1e6 * dim, dim, 2, 1e-3) for dim in (16, 64, 256)]
    peaks, half_dim = fit_products(slow, overhead=0.0)
    assert half_dim == 256
    assert 0 < peaks["float32"] < np.inf
    times = [CollectiveTime(sent, 1, 1e-3 / sent**0.1) for sent in (1e3, 1e5)]
    assert fit_collectives(times)[0] == pytest.approx(1e5 / (1e-3 / 1e5**0.1))
    times = [CollectiveTime(sent, 1, 1e-12 * sent**1.5) for sent in (1e3, 1e5)]
    assert fit_collectives(times)[1] == 0
    assert fit_overhead([8, 64], [2.0, 1.0]) == 0


def clock_of(machine, mesh):
    """A clock, and loops that advance it by what the machine's trips take, and by new pages."""
    now = [0.0]
    size = machine_timings.TRAFFIC_BYTES // mesh.size

    def seconds_of(body, arrays, dtype):
        if arrays[0].shape == (1,):  # a temporary array, written twice in a trip
            return machine.traffic_seconds(4 * size)
        if arrays[0].shape == (8, 8):
            return 1e-6 + body.keywords["count"] * machine.overhead
        if len(arrays) == 3:
            large, small = arrays[0].shape
            product = machine.product_seconds(large, large, small, dtype, batch=2)
            return product + 2 * machine.overhead
        kinds = {"psum": "all-reduce", "ppermute": "collective-permute"}
        kind = next((kinds[name] for name in body.__code__.co_names if name in kinds), None)
        if kind is None:
            return machine.traffic_seconds(2 * arrays[0].nbytes)
        sent = ring_bytes_sent(kind, arrays[0].nbytes, mesh.size)
        return machine.collective_seconds(kind, sent, mesh.size)

    def loop(_mesh, _program, case):
        new = machine.page_seconds(size) if case.arrays[0].shape == (1,) else 0.0

        def run(trips):
            now[0] += 1e-3 + trips * seconds_of(*case) + new * bool(trips)

        return run

    return types.SimpleNamespace(perf_counter=lambda: now[0]), loop


def test_a_machine_is_found_by_its_own_clock(monkeypatch):
    """Every part of the measurement, on a machine that takes exactly the seconds of the model."""
    clock, loop = clock_of(WANTED, jax.make_mesh((8,), ("device",)))
    monkeypatch.setattr(machine_timings, "time", clock)
    monkeypatch.setattr(machine_timings, "_compiled", lambda mesh, case: None)
    monkeypatch.setattr(machine_timings, "_loop", loop)
    found = px.analysis.measure_machine()
    assert found.name == WANTED.name
    assert found.flops == pytest.approx(WANTED.flops)
    assert found.levels[0].bandwidth == pytest.approx(5e8)
    assert found.levels[0].latency == pytest.approx(3e-5)
    assert (found.levels[0].name, found.devices, found.efficiency) == ("node", 8, 1)
    for name in ("memory_bandwidth", "overhead", "half_dim", "page_bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(WANTED, name))
    assert found.thread_share == pytest.approx(1, rel=0.02)
    assert found.memory > 2**20
    assert Machine.from_toml(found.to_toml()) == found


def test_one_thread_computes_a_small_product(monkeypatch):
    mesh = jax.make_mesh((1,), ("device",))
    clock, loop = clock_of(dataclasses.replace(WANTED, thread_share=0.25), mesh)
    monkeypatch.setattr(machine_timings, "time", clock)
    monkeypatch.setattr(machine_timings, "_compiled", lambda mesh, case: None)
    monkeypatch.setattr(machine_timings, "_loop", loop)
    assert machine_timings._thread_share(mesh, WANTED) == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize("count", [1, 2])
def test_the_programs_run(monkeypatch, count):
    """Once through each: what they took says nothing here, the size of products neither, which
    follows from the seconds of one trip, on a busy machine of none, and may take gigabytes."""
    monkeypatch.setattr(machine_timings, "product_size", lambda rate: 256)
    monkeypatch.setattr(machine_timings, "SECONDS", 0.0)
    monkeypatch.setattr(machine_timings, "ROUNDS", 1)
    monkeypatch.setattr(machine_timings, "TRAFFIC_BYTES", 2**20)
    found = px.analysis.measure_machine(jax.devices()[:count])
    assert found.devices == count
    assert list(found.flops) == ["float32", "bfloat16"]
    assert len(found.levels) == (count > 1)


def test_what_is_multiplied_neither_grows_nor_vanishes():
    x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    w = np.tile(hadamard(16, np.float32), 4)
    back = machine_timings._there_and_back(jnp.array(x), jnp.array(w), jnp.array(w.T / 64))
    np.testing.assert_allclose(back, x, rtol=1e-5, atol=1e-6)
