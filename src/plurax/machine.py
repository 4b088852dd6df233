"""Describe a machine: what its devices compute, hold and send, in seconds. Imports no JAX.

Plans are compared in seconds, so every cost of a step becomes seconds here, of three kinds:

    products     m × n × k multiply-adds at the peak rate of their dtype, less what small dims lose
    traffic      bytes read from and written to the device's memory
    collectives  bytes sent over the links, and a latency for each message that waits for another

Links come in levels, innermost first. Four nodes of eight devices, 300 GB/s inside a node and
25 GB/s for each device between nodes, are

    Level("node", 8, 300e9, 3.4e-6), Level("cluster", 32, 25e9, 14e-6)

The devices of a mesh are numbered in mesh order, the last axis fastest, and device `i` is in node
`i // 8`. A group of a collective is `group_size` devices that are `stride` apart: on the mesh
(data=4, tensor=8), the groups over `tensor` are 8 devices 1 apart, in one node each; those over
`data` are 4 devices 8 apart, one in each node. Eight such groups leave every node at once, and
each device has its own 25 GB/s. One group of all 32 devices has 8 members in every node, and a
ring leaves a node once for the data of all of them: 8 × 25 GB/s. That is what collective libraries
do with one ring for each network card.
"""

import bisect
import collections
import dataclasses
import importlib.resources
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.disk import replace_file
from plurax.machine_fields import (
    MACHINE_FIELDS,
    WIDTHS,
    Level,
    check_devices,
    check_fields,
    check_groups,
)
from plurax.notebook import html_table
from plurax.reading import parse_toml, read_text, refusing
from plurax.toml_writer import write_toml
from plurax.validate import changed_repr

ONE_THREAD = 2**23
"""The operations of a product to which Eigen gives one thread: two cores compute up to twice as
many in the same time (measured, JAX 0.10.2)."""


@dataclasses.dataclass(frozen=True, repr=False)
class Machine:
    """The rates, the memory and the links of the devices that a plan runs on.

    A machine is a value, as a plan is: frozen, comparable, hashable, saved as TOML and edited by
    hand. `Machine.preset` has published hardware, `Machine.load` reads a file. Its devices are
    alike, unless `Machine.uneven` made it.

    Raises `MachineError` for a value that no machine has.

    >>> machine = Machine.preset("8xA100-80GB", nodes=4)
    >>> machine.devices, machine.memory
    (32, 80000000000)
    >>> machine == Machine.from_toml(machine.to_toml())
    True
    >>> round(1e3 * machine.product_seconds(4096, 4096, 4096, "bfloat16"), 3)  # milliseconds
    0.564
    """

    name: str
    """What the machine is called in tables."""
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    """The peak rate of one device in matrix products, for each dtype by its name: floating-point
    operations per second, a multiply-add being two."""
    memory: float
    """The bytes that one device can hold."""
    memory_bandwidth: float
    """The bytes per second that one device reads and writes in its own memory."""
    levels: Sequence[Level] = ()
    """The links between devices, innermost level first; none for one device."""
    overhead: float = 0.0
    """The seconds that starting an operation costs a device, whatever its size."""
    efficiency: float = 1.0
    """The share of all these rates that a program reaches at its best: 1 where they are measured,
    0.8 where they are published peaks."""
    half_dim: float = 0.0
    """The smallest dim of a matrix product at which half of that is reached; see
    `product_seconds`."""
    product_efficiency: float | None = None
    """The share of `flops` that a matrix product reaches at its best, where it is another one than
    `efficiency`."""
    groups: Sequence[tuple[int, "Machine"]] = ()
    """If devices differ, all of them in mesh order: how many, and one such device as a machine. The
    other fields are then those of the slowest and smallest. Empty if all are alike."""
    correction: float = 1.0
    """What steps took on it, as a multiple of what all these numbers say: learned from runs by
    `plurax machine --runs`. All seconds are multiplied by it."""
    platform: str = "cpu"
    """`cpu`, `gpu` or `tpu`: whose compiler makes its programs. Memory is planned by its rules."""
    fast_memory: float = 0.0
    """The bytes of a TPU's fast memory in which its compiler places arrays, what kernels need for
    themselves taken off; 0 where they are not known, and not counted on."""
    page_bandwidth: float = 0.0
    """The bytes per second that the system of a CPU hands out in pages where a program writes
    memory for the first time (page faults); 0 where that is not known, and not counted."""
    thread_share: float = 1.0
    """The share of a product's rate that one thread of a CPU reaches: alone it computes a product
    of up to `ONE_THREAD` operations, and each of a batch."""

    def __post_init__(self) -> None:
        where = f"Machine({self.name!r})"
        check_fields(self, where, MACHINE_FIELDS)
        counts = [count for count, _ in self.groups]
        if counts and sum(counts) != self.devices:
            raise errors.machine_groups_do_not_add_up(where, counts, self.devices)

    # --- Seconds ----------------------------------------------------------------------------------

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.levels[-1].devices if self.levels else 1

    @property
    def start_seconds(self) -> float:
        """The seconds that starting an operation costs a device: `overhead`, corrected."""
        return self.correction * self.overhead

    def product_seconds(self, m: int, n: int, k: int, dtype: str, batch: int = 1) -> float:
        """Return the seconds of `batch` products (m, k) × (k, n) on one device.

        Small dims leave most of a matrix unit idle. Of the peak, a product reaches
        `product_efficiency * d / (half_dim + d)`, where `d` is the smallest of m, n and k. Reading
        the operands is not in it (`traffic_seconds`), nor is `overhead`.

        - `dtype`: a name. For one without a rate, that of a dtype as wide; else the slowest rate.

        >>> machine = Machine("two", {"float32": 1e12}, 10**9, 1e11, half_dim=100)
        >>> machine.product_seconds(1000, 1000, 100, "float32")  # 2e8 operations at half of 1e12
        0.0004
        """
        smallest = min(m, n, k)
        if smallest == 0:
            return 0.0
        best = self.product_efficiency or self.efficiency
        reached = best * smallest / (self.half_dim + smallest)
        counted = operations = 2.0 * m * n * k
        if self.thread_share < 1:
            counted = max(operations, min(operations, ONE_THREAD) / self.thread_share)
        return self.correction * batch * counted / (reached * self._peak(dtype))

    def traffic_seconds(self, bytes: float) -> float:
        """Return the seconds in which a device reads or writes some bytes of its memory."""
        return self.correction * bytes / (self.efficiency * self.memory_bandwidth)

    def page_seconds(self, bytes: float) -> float:
        """Return the seconds in which the system hands out some bytes of memory; 0 if unknown."""
        return self.correction * bytes / self.page_bandwidth if self.page_bandwidth else 0.0

    def collective_seconds(
        self,
        kind: str,
        bytes_sent: float,
        group_size: int,
        stride: int = 1,
        *,
        mesh_devices: int | None = None,
    ) -> float:
        """Return the seconds of a collective, run by all groups of a mesh at once.

        The slowest level that a group spans bounds it. Inside the innermost level each device
        sends `bytes_sent`. At the next, the members of a group in one node leave it together, each
        over its own links, and share what the ring sends between nodes. An `all-to-all` sends each
        device's part of what leaves the node; a `collective-permute` may send all of it. Of the
        axes of a torus each carries its part of the bytes.

        Latency counts once for each doubling of the members of a level, as in trees and recursive
        doubling, and once in all for `collective-permute`.

        - `kind`, `bytes_sent`: as in `plurax.analysis.Collective`.
        - `group_size`, `stride`: a group is that many devices, that far apart in mesh order.
        - `mesh_devices`: devices of the mesh; default all of the machine.

        Raises `MachineError` for a group or a mesh that is larger than the machine.

        >>> levels = (Level("node", 8, 300e9), Level("cluster", 32, 25e9))
        >>> machine = Machine("four nodes", {"float32": 1e12}, 10**9, 1e11, levels)
        >>> [machine.collective_seconds("all-gather", 3e9, *group) for group in ((8, 1), (4, 8))]
        [0.01, 0.12]
        >>> machine.collective_seconds("all-gather", 3e9, 32)  # 8 members share 8 × 25 GB/s
        0.015
        """
        for size in (group_size, stride):
            if size < 1:
                raise errors.machine_devices_not_whole(f"Machine({self.name!r})", size, 1)
        if group_size == 1:
            return 0.0
        mesh_devices = self.devices if mesh_devices is None else mesh_devices
        needed = max(mesh_devices, (group_size - 1) * stride + 1)
        if needed > self.devices:
            raise errors.MachineError(
                f"a collective over {needed} devices, and {self.name} has {self.devices}. Describe "
                "a machine of more nodes: plurax.Machine.preset('8xA100-80GB', nodes=4)."
            )
        seconds, waits, inside, links = 0.0, 0.0, 1, 0.0  # members of a group in the last level
        for level in self.levels:
            members = _fewest_members(level.devices, group_size, stride, mesh_devices)
            if members > inside:
                if level.torus and inside > 1 and kind != "collective-permute":
                    # https://jax-ml.github.io/scaling-book/sharding: rings around both axes.
                    links += level.bandwidth
                    seconds = bytes_sent / (self.efficiency * links)
                else:
                    sent, links = bytes_sent, level.bandwidth
                    if kind.endswith("all-to-all"):
                        sent *= (group_size - inside) / (group_size - 1)
                    elif kind != "collective-permute":
                        sent /= inside
                    seconds = max(seconds, sent / (self.efficiency * links))
                wait = level.latency * math.ceil(math.log2(math.ceil(members / inside)))
                waits = level.latency if kind == "collective-permute" else waits + wait
                inside = members
        return self.correction * (seconds + waits)

    def _peak(self, dtype: str) -> float:
        """Return the peak rate for products of a dtype."""
        if dtype in self.flops:
            return self.flops[dtype]
        width = WIDTHS.get(dtype)
        alike = [rate for name, rate in self.flops.items() if WIDTHS[name] == width]
        return max(alike) if alike else min(self.flops.values())

    # --- Devices that differ ----------------------------------------------------------------------

    @classmethod
    def uneven(
        cls, name: str, groups: Sequence[tuple[int, "Machine"]], levels: Sequence[Level]
    ) -> "Machine":
        """Return a machine whose devices differ: so many of each kind, in mesh order.

        Each kind is a machine of one device. The machine's own rates and memory are those of the
        slowest and the smallest, so that what they allow, every device can do; `rates_of` has those
        of some devices.

        Raises `MachineError` where the groups do not add up to the devices of the levels.

        >>> kinds = [(8, Machine.preset("A100-80GB")), (8, Machine.preset("V100-32GB"))]
        >>> machine = Machine.uneven("lab", kinds, [Level("cluster", 16, 6.25e9)])
        >>> machine.memory, machine.rates_of(range(8)).memory
        (32000000000, 80000000000)
        """
        groups = check_groups(f"Machine({name!r})", "groups", groups)
        kinds = [kind for _, kind in groups]
        if not kinds:
            raise errors.machine_groups_do_not_add_up(f"Machine({name!r})", [0], 1)
        return cls(
            name=name,
            flops={
                dtype: min(kind._peak(dtype) for kind in kinds)
                for dtype in WIDTHS
                if any(dtype in kind.flops for kind in kinds)
            },
            memory=min(kind.memory for kind in kinds),
            memory_bandwidth=min(kind.memory_bandwidth for kind in kinds),
            levels=levels,
            overhead=max(kind.overhead for kind in kinds),
            efficiency=min(kind.efficiency for kind in kinds),
            half_dim=max(kind.half_dim for kind in kinds),
            product_efficiency=min(kind.product_efficiency or kind.efficiency for kind in kinds)
            if any(kind.product_efficiency for kind in kinds)
            else None,
            groups=groups,
            correction=max(kind.correction for kind in kinds),
            platform=kinds[0].platform,
            fast_memory=min(kind.fast_memory for kind in kinds),
            page_bandwidth=min(kind.page_bandwidth for kind in kinds),
            thread_share=min(kind.thread_share for kind in kinds),
        )

    def rates_of(self, devices: Iterable[int]) -> "Machine":
        """Return the machine whose rates and memory some devices have, by their mesh order.

        Raises `MachineError` if they differ. The devices of a pipeline stage, or of `tensor`, have
        the same share of the work, so they must be alike; those of different stages need not be,
        nor without a pipeline those of different replicas.
        """
        if not self.groups:
            return self
        ends = list(itertools.accumulate(count for count, _ in self.groups))
        held = collections.Counter(bisect.bisect_right(ends, device) for device in devices)
        kinds = {index: self.groups[index][1] for index in sorted(held)}
        if len({*kinds.values()}) > 1:
            counts = " and ".join(f"{held[index]} × {kind.name}" for index, kind in kinds.items())
            raise errors.MachineError(
                f"{self.name}: {counts} would share one stage, and the devices of a stage, or "
                "those of `tensor`, have the same share of the work: all would wait for the "
                "slowest. Put devices that differ into different stages, with `pipeline`, or into "
                "replicas with more or fewer microbatches, as Plan(data=2, microbatches=(3, 1)), "
                "or plan for one kind of them."
            )
        return next(iter(kinds.values()))

    # --- Text, files and presets ------------------------------------------------------------------

    def __repr__(self) -> str:
        return changed_repr(self)

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {name}: {value}" for name, value in self._rows())])

    def _repr_html_(self) -> str:
        return html_table(self._title(), ["", ""], self._rows())

    def _title(self) -> str:
        return f"{self.name}: {self.devices} device{'s' if self.devices > 1 else ''}"

    def _rows(self) -> list[tuple[str, str]]:
        """Return what devices and links do, as names and texts."""
        if self.groups:
            kinds = [
                (f"{count} × {kind.name}: {name}", value)
                for count, kind in self.groups
                for name, value in kind._rows()
            ]
            return [*kinds, *self._link_rows()]
        shares = [
            f"{self.efficiency:.0%} of these rates" if self.efficiency < 1 else "",
            f"{self.product_efficiency:.0%} in products" if self.product_efficiency else "",
            f"half of it at a smallest dim of {self.half_dim:g}" if self.half_dim else "",
            f"{self.thread_share:.0%} on one thread" if self.thread_share < 1 else "",
        ]
        rows = [
            *((f"products in {dtype}", _si(rate, "flop/s")) for dtype, rate in self.flops.items()),
            ("memory", f"{_si(self.memory, 'B')}, {_si(self.memory_bandwidth, 'B/s')}"),
            *self._link_rows(),
            ("pages of new memory", _si(self.page_bandwidth, "B/s")),
            ("overhead of an operation", _si(self.overhead, "s")),
            ("reached at best", ", ".join(filter(None, shares))),
            ("seconds, by runs", f"× {self.correction:g}" if self.correction != 1 else ""),
        ]
        return [(name, value) for name, value in rows if value]

    def _link_rows(self) -> list[tuple[str, str]]:
        return [
            (
                f"{level.name} of {level.devices}",
                ", latency ".join(
                    filter(None, [_si(level.bandwidth, "B/s"), _si(level.latency, "s")])
                )
                + ", another axis of the torus" * level.torus,
            )
            for level in self.levels
        ]

    def to_toml(self) -> str:
        """Return the machine as TOML, with all fields."""
        own = ("levels", "groups")
        values: dict[str, Any] = {"name": self.name} if self.groups else _own_fields(self, own)
        if self.groups:
            values["groups"] = [{"devices": n, **_own_fields(kind, own)} for n, kind in self.groups]
        if self.levels:
            values["levels"] = [_own_fields(level) for level in self.levels]
        return write_toml(values, float_text=_rate_text)

    @classmethod
    def from_toml(cls, text: str, *, source: str = "the machine") -> "Machine":
        """Parse a machine from TOML. Raises `MachineError`, which names `source`."""
        with refusing(lambda reason: errors.machine_not_toml(source, reason)):
            values = parse_toml(text)
        try:
            levels = [_build(Level, one) for one in _tables(values, "levels")]
            groups = [_group(one) for one in _tables(values, "groups")]
            if not groups:
                return _build(cls, {**values, "levels": levels, "groups": ()})
            for key in values:
                if key not in ("name", "levels", "groups"):
                    raise errors.MachineError(
                        f"{key!r} is beside [[groups]]. Where devices differ, each group has its "
                        f"own: write {key!r} into every [[groups]]."
                    )
            if "name" not in values:
                raise errors.machine_missing_key("Machine", "name")
            return cls.uneven(values["name"], groups, levels)
        except errors.MachineError as error:
            raise errors.MachineError(f"{source} does not describe a machine: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the machine to a TOML file."""
        replace_file(Path(path), self.to_toml().encode())

    @classmethod
    def load(cls, path: str | Path) -> "Machine":
        """Read a machine from a TOML file. Raises `MachineError`."""
        with refusing(lambda reason: errors.machine_not_toml(str(path), reason)):
            text = read_text(path)
        return cls.from_toml(text, source=str(path))

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> "Machine":
        """Return published hardware by name: so many devices of a kind in each of `nodes` nodes.

        `8xA100-80GB` is a node of eight, `4xA100-80GB` half of one, `A100-80GB` one device.
        `Machine.presets()` lists the largest nodes. Sources are beside the values, in
        `presets.toml` of this package.

        Raises `MachineError` for a name that is not there, and one that lists those that are.

        >>> Machine.preset("V100-32GB").devices, Machine.preset("8xTPU-v5e", nodes=2).devices
        (1, 16)
        """
        hardware = published()
        found = re.fullmatch(r"(?:(\d+)x)?(.+)", name)
        kind, count = (found[2], int(found[1] or 1)) if found else (name, 1)
        if kind not in hardware:
            raise errors.MachineError(
                f"there is no published machine {name!r}."
                f"{errors.did_you_mean(name, cls.presets())} There are "
                f"{', '.join(cls.presets())}, and fewer devices of each: 4xA100-80GB, A100-80GB. "
                "plurax.Machine.load(path) reads a machine of your own."
            )
        check_devices("nodes", nodes)
        device = hardware[kind]
        in_node, network = device.pop("node"), device.pop("network")
        device.pop("compiler", None)
        largest = in_node[-1]["devices"]
        if not 1 <= count <= largest:
            raise errors.MachineError(
                f"{name!r}: a node holds 1 to {largest} {kind}; more come as nodes: "
                f"plurax.Machine.preset('{largest}x{kind}', nodes=2)."
            )
        levels = [Level(**one) for one in in_node if one["devices"] < count]
        if count > 1:
            last = in_node[len(levels)]
            levels.append(Level(**{**last, "devices": count}))
        if nodes > 1:
            levels.append(Level(devices=nodes * count, **network))
        title = f"{nodes} nodes of {name}" if nodes > 1 else name
        return cls(name=title, levels=levels, **device)

    @classmethod
    def presets(cls) -> list[str]:
        """Return the names for `preset`, of whole nodes.

        >>> "8xA100-80GB" in Machine.presets()
        True
        """
        return [f"{one['node'][-1]['devices']}x{kind}" for kind, one in published().items()]


def _fewest_members(devices: int, group_size: int, stride: int, mesh_devices: int) -> int:
    """Return how many members of a group share a block of `devices`, in the group with fewest.

    >>> _fewest_members(8, 4, 8, 32), _fewest_members(8, 32, 1, 32), _fewest_members(8, 4, 2, 32)
    (1, 8, 4)

    Groups of 6 do not fit nodes of 8: devices 6 and 7 are in another node than 8 to 11.

    >>> _fewest_members(8, 6, 1, 24), _fewest_members(8, 6, 1, 6)
    (2, 6)
    """
    extent = group_size * stride
    if devices % extent == 0 or mesh_devices <= devices:
        return group_size
    if stride >= devices:
        return 1
    if extent % devices == 0 and devices % stride == 0:
        return devices // stride
    fewest = group_size
    for block in range(0, min(mesh_devices, math.lcm(devices, extent)), extent):  # then it repeats
        for first in range(block, block + stride):
            blocks = [member // devices for member in range(first, first + extent, stride)]
            fewest = min(fewest, *collections.Counter(blocks).values())
    return fewest


def _build(cls: type, values: dict[str, Any]) -> Any:
    """Return a dataclass from the values of a table. Raises `MachineError` for other keys."""
    fields = dataclasses.fields(cls)
    known = [field.name for field in fields]
    for key in values:
        if key not in known:
            raise errors.MachineError(
                f"{key!r} is not a field of a {cls.__name__}.{errors.did_you_mean(key, known)} The "
                f"fields are {', '.join(known)}."
            )
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in values:
            raise errors.machine_missing_key(cls.__name__, field.name)
    return cls(**values)


def _group(values: dict[str, Any]) -> tuple[int, Machine]:
    """Return some devices and their kind from a table of a file. Raises `MachineError`."""
    if "devices" not in values:
        raise errors.machine_missing_key("group", "devices")
    kind = {key: value for key, value in values.items() if key != "devices"}
    return values["devices"], _build(Machine, kind)


def _tables(values: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tables of an array of tables, none if there is none. Raises `MachineError`."""
    tables = values.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise errors.MachineError(
            f"{key}={tables!r}, and must be tables, one [[{key}]] for each. A level is:\n\n"
            '    [[levels]]\n    name = "node"\n    devices = 8\n    bandwidth = 300e9\n'
            "    latency = 3.4e-6"
        )
    return tables


def published() -> dict[str, dict[str, Any]]:
    """Return the table of published hardware: of each kind its fields, links and compiler."""
    text = importlib.resources.files("plurax").joinpath("presets.toml").read_text("utf-8")
    return parse_toml(text)


_LEFT_OUT = {
    "fast_memory": 0, "page_bandwidth": 0, "thread_share": 1, "product_efficiency": None,
    "torus": False,
}  # fmt: skip
"""Fields that a file leaves out where they have these values."""


def _own_fields(value: "Machine | Level", left_out: Sequence[str] = ()) -> dict[str, Any]:
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if values.get("platform") == "cpu":  # files written before there was another are as they were
        del values["platform"]
    for name, default in _LEFT_OUT.items():
        if values.get(name) == default and name in values:
            del values[name]
    return {name: own for name, own in values.items() if name not in left_out}


def _rate_text(value: float) -> str:
    """Return a float in TOML: `2.039e+12` rather than thirteen digits, and exactly the number."""
    if value == 0 or 1e-3 <= value < 1e5:
        return repr(value)
    return f"{Decimal(repr(value)).normalize():e}"


def _si(value: float, unit: str) -> str:
    """Return a number with a prefix of the SI.

    >>> _si(2.039e12, "B/s"), _si(3.4e-6, "s"), _si(0, "s")
    ('2.04 TB/s', '3.4 µs', '')
    """
    if value == 0:
        return ""
    power = min(5, max(-3, math.floor(math.log10(value) / 3)))
    prefix = ("n", "µ", "m", "", "k", "M", "G", "T", "P")[power + 3]
    return f"{value / 1000.0**power:.3g} {prefix}{unit}"
