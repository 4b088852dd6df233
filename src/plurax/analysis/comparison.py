"""Two plans side by side: what differs between them, and what that costs by their estimates."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from plurax.analysis.estimate import Estimate, human_seconds
from plurax.notebook import html_table
from plurax.plan import Plan
from plurax.tree import human_bytes

NOTHING = "-"
"""Stands for a part that one of both does not have."""


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Two estimates side by side: how their plans differ, and the difference that it makes.

    **Fields:** `first`, `second`: the `Estimate`s; `names`: what to call them.

    >>> import jax, jax.numpy as jnp, optax, plurax as px
    >>> task = px.Task(
    ...     init=lambda key: jnp.zeros((1024, 256)),
    ...     loss=lambda params, batch, keys: jnp.sum((batch["x"] @ params) ** 2, axis=1),
    ... )
    >>> batch = {"x": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    >>> machine = px.Machine.preset("8xA100-80GB")
    >>> first, second = (
    ...     px.estimate(task, optax.adam(1e-3), plan, batch, machine)
    ...     for plan in (px.Plan(data=4), px.Plan(data=4, zero=1))
    ... )
    >>> px.analysis.Comparison(first, second).plan_rows()
    [('zero', '0', '1')]
    """

    first: Estimate
    second: Estimate
    names: tuple[str, str] = ("first", "second")

    def plan_rows(self) -> list[tuple[str, str, str]]:
        """Return what differs: name, in the first and in the second plan. See `differences`."""
        rows = differences(self.first.plan, self.second.plan)
        for name, of in (
            ("examples of a step", lambda one: str(one.batch_size)),
            ("machine", lambda one: one.machine.name),
        ):
            if of(self.first) != of(self.second):
                rows.append((name, of(self.first), of(self.second)))
        return rows

    def cost_rows(self) -> list[tuple[str, str, str, str]]:
        """Return what it costs: name, of the first, of the second, and the difference."""
        return [
            *self._rows("a step", lambda one: one.parts(), human_seconds),
            *self._rows("memory of a device", lambda one: one.memory, human_bytes),
            ("  left of it", _left(self.first), _left(self.second), ""),
            *self._rows("sent by a device", _sent, human_bytes),
        ]

    def _rows(
        self,
        title: str,
        of: Callable[[Estimate], Mapping[str, float]],
        text: Callable[[float], str],
    ) -> Iterator[tuple[str, str, str, str]]:
        """Yield the sum of what `of` returns, and then its parts."""
        first, second = of(self.first), of(self.second)
        pairs = {title: (sum(first.values()), sum(second.values()))}
        for name in {**first, **second}:
            pairs[f"  {name}"] = (first.get(name, 0), second.get(name, 0))
        for name, (before, after) in pairs.items():
            if before or after:
                cells = (text(before) if before else NOTHING, text(after) if after else NOTHING)
                yield (name, *cells, _difference(before, after, text))

    def __repr__(self) -> str:
        title, *_ = self.cost_rows()
        return f"Comparison({self.names[0]} and {self.names[1]}: {' '.join(title[3:])} per step)"

    def __str__(self) -> str:
        plans = self.plan_rows()
        rows = [("", *self.names, ""), *((*row, "") for row in plans)] if plans else []
        costs = [("", *self.names, "difference"), *self.cost_rows()]
        width = [max(map(len, column)) for column in zip(*rows, *costs, strict=True)]
        lines = [
            "  ".join(cell.ljust(size) for cell, size in zip(row, width, strict=True)).rstrip()
            for row in (*rows, *costs)
        ]
        lines.insert(len(rows), "")
        return "\n".join([self._title(), *([] if plans else ["the plans are equal"]), *lines])

    def _repr_html_(self) -> str:
        plans = html_table(self._title(), ["", *self.names], self.plan_rows())
        return plans + html_table("", ["", *self.names, "difference"], self.cost_rows())

    def _title(self) -> str:
        where = dict.fromkeys(one.machine.name for one in (self.first, self.second))
        return f"{' and '.join(self.names)}, estimated on {' and '.join(where)}"


def differences(first: Plan, second: Plan) -> list[tuple[str, str, str]]:
    """Return the fields in which two plans differ: name, in the first and in the second.

    Sharding rules differ pattern by pattern; of the pinned strategies the numbers are returned, and
    how many of them the other plan does not have.

    >>> differences(Plan(tensor=2, shardings={"in": (None, "tensor")}), Plan(tensor=4))
    [('tensor', '2', '4'), ("shardings['in']", "(None, 'tensor')", '-')]
    """
    rows = []
    for field in dataclasses.fields(Plan):
        values = [getattr(plan, field.name) for plan in (first, second)]
        if field.name not in ("shardings", "strategies") and values[0] != values[1]:
            rows.append((field.name, str(values[0]), str(values[1])))
    own, other = dict(first.rules), dict(second.rules)
    for pattern in {**own, **other}:
        if own.get(pattern) != other.get(pattern):
            entries = (str(own.get(pattern, NOTHING)), str(other.get(pattern, NOTHING)))
            rows.append((f"shardings[{pattern!r}]", *entries))
    common = own.keys() & other.keys()
    orders = [", ".join(one for one in rules if one in common) for rules in (own, other)]
    if orders[0] != orders[1]:  # of the patterns that match, the first counts
        rows.append(("order of shardings", orders[0], orders[1]))
    if first.strategies != second.strategies:
        rows.append(("strategies", _strategies(first, second), _strategies(second, first)))
    return rows


def _strategies(own: Plan, other: Plan) -> str:
    if own.strategies is None:
        return NOTHING
    if other.strategies is None:
        return f"{len(own.strategies)} equations"
    if own.strategies.traced != other.strategies.traced:
        return f"{len(own.strategies)} equations, of another loss"
    alone = set(own.strategies.equations) - set(other.strategies.equations)
    return f"{len(own.strategies)} equations, {len(alone)} of them its own"


def _difference(before: float, after: float, text: Callable[[float], str]) -> str:
    """Return the difference as text, with its share of what was before."""
    if before == after:
        return "0"
    change = f"{'+' if after > before else '-'}{text(abs(after - before))}"
    return f"{change}  {after / before - 1:+.0%}" if before else change


def _left(one: Estimate) -> str:
    return human_bytes(one.spare) if one.fits else f"{human_bytes(-one.spare)} too much"


def _sent(one: Estimate) -> Mapping[str, float]:
    return {f"over {axes}": size for axes, size in one.bytes_sent.items()}
