"""What the fields of a machine may be, and the links between its devices. Imports no JAX."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from plurax import errors
from plurax.validate import whole_number

WIDTHS = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
"""The dtypes that a machine may have a rate for, and their bytes."""


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of links between the devices of a machine.

    **Fields:**

    - `name`: what it joins: `node`, `cluster`.
    - `devices`: the number of devices that one group of this level holds.
    - `bandwidth`: bytes per second that each device sends while all of them send.
    - `latency`: seconds from sending a message to its arrival, as bytes go to none.
    - `torus`: whether it is another axis of a torus, with links of its own: a group that spans both
      axes sends over both at once.

    Raises `MachineError` for a value that no link has.
    """

    name: str
    devices: int
    bandwidth: float
    latency: float = 0.0
    torus: bool = False

    def __post_init__(self) -> None:
        check_fields(self, f"Level({self.name!r})", LEVEL_FIELDS)


Check = Callable[[str, str, Any], Any]
"""`check(where, field, value)` returns the field's value, or raises `MachineError`."""


def check_fields(value: object, where: str, checks: Mapping[str, Check]) -> None:
    """Make each field of a frozen value what its check returns. Raises `MachineError`."""
    for field, check in checks.items():
        object.__setattr__(value, field, check(where, field, getattr(value, field)))


def check_devices(where: str, value: Any, least: int = 1) -> int:
    """Return a number of devices of at least `least`. Raises `MachineError`."""
    number = whole_number(value, least)
    if number is None:
        raise errors.machine_devices_not_whole(where, value, least)
    return number


def _at_least_zero(where: str, field: str, value: Any, *, positive: bool = False) -> float:
    """Return a finite number, above 0 if `positive`. Raises `MachineError`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        number = float(value)
        if number > 0 or (number == 0 and not positive):
            return number
    raise errors.MachineError(
        f"{where}: {field}={value!r}, and must be a finite number "
        f"{'above 0' if positive else 'of at least 0'}, in flop/s, bytes, bytes/s or seconds "
        "without a prefix: 80 GB are 80e9."
    )


_positive = functools.partial(_at_least_zero, positive=True)


def _efficiency(where: str, field: str, value: Any) -> float:
    share = _positive(where, field, value)
    if share > 1:
        raise errors.MachineError(
            f"{where}: {field}={share!r}, and is the share of the peak rates that programs "
            "reach: at most 1."
        )
    return share


def _flops(where: str, field: str, value: Any) -> dict[str, float]:
    """Return rates by dtype. Raises `MachineError`."""
    if not isinstance(value, Mapping) or not value:
        raise errors.MachineError(
            f"{where}: flops={value!r}, and must be rates by dtype: "
            "{'float32': 156e12, 'bfloat16': 312e12}."
        )
    for dtype in value:
        if dtype not in WIDTHS:
            raise errors.MachineError(
                f"{where}: flops has a rate for {dtype!r}, which is none of the dtypes "
                f"{', '.join(WIDTHS)}."
            )
    return {dtype: _positive(where, f"{field}[{dtype!r}]", rate) for dtype, rate in value.items()}


def _platform(where: str, field: str, value: Any) -> str:
    if value not in ("cpu", "gpu", "tpu"):
        raise errors.MachineError(
            f"{where}: platform={value!r}, and must be 'cpu', 'gpu' or 'tpu', as JAX names what "
            "compiles for it."
        )
    return str(value)


def _torus(where: str, field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise errors.MachineError(f"{where}: torus={value!r}, and must be true or false.")
    return value


def _levels(where: str, field: str, value: Any) -> tuple[Level, ...]:
    """Return levels, each of whole groups of the one before it. Raises `MachineError`."""
    levels = tuple(value)
    if not all(isinstance(level, Level) for level in levels):
        raise errors.MachineError(
            f"{where}: levels={levels!r}, and must be levels of links: "
            "[plurax.analysis.Level('node', 8, bandwidth=300e9, latency=3.4e-6)]."
        )
    for inner, outer in itertools.pairwise(levels):
        if outer.devices % inner.devices or outer.devices == inner.devices:
            raise errors.MachineError(
                f"{where}: level {outer.name!r} of {outer.devices} devices does not hold whole "
                f"groups of level {inner.name!r}, of {inner.devices}. Levels come innermost "
                "first, each with a larger multiple of the devices before it: 8, 32."
            )
    return levels


def check_groups(where: str, field: str, value: Any) -> tuple[tuple[int, Any], ...]:
    """Return groups of devices, each of one kind. Raises `MachineError`."""
    counted = tuple((check_devices(where, count), kind) for count, kind in value)
    for _, kind in counted:
        if kind.levels or kind.groups:
            raise errors.MachineError(
                f"{where}: the kind {kind.name!r} of a group is a machine of {kind.devices} "
                "devices, and must be one device: plurax.Machine.preset('A100-80GB'). The links "
                "are the whole machine's levels."
            )
    return counted


LEVEL_FIELDS: Mapping[str, Check] = {
    "devices": lambda where, field, value: check_devices(where, value, least=2),
    "bandwidth": _positive,
    "latency": _at_least_zero,
    "torus": _torus,
}
MACHINE_FIELDS: Mapping[str, Check] = {
    "flops": _flops,
    "memory": lambda where, field, value: int(_positive(where, field, value)),
    **dict.fromkeys(("memory_bandwidth", "correction"), _positive),
    **dict.fromkeys(("efficiency", "thread_share"), _efficiency),
    "product_efficiency": lambda where, field, value: (
        None if value is None else _efficiency(where, field, value)
    ),
    **dict.fromkeys(("overhead", "half_dim", "fast_memory", "page_bandwidth"), _at_least_zero),
    "platform": _platform,
    "levels": _levels,
    "groups": check_groups,
}
"""Of each field the check that returns its value, or raises `MachineError`."""
