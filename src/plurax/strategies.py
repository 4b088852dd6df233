"""The shard strategies of single equations and the sharding rules that a plan pins. Imports no JAX.

The shardings of parameters do not say everything: from the same parameters, an equation may be
computed in several ways, and the partitioner's default is not always the best of the whole step.
Where a search found another one, the plan says so, one entry for each equation:

    [strategies]
    traced = "3b1f09a2c4d5e6f7"

    [[strategies.equations]]
    equation = "14/3 dot_general"
    inputs = [["replicated", "tensor"], ["tensor", "replicated"]]
    where = "language_model.py:33 (block)"

`equation` is the path of the equation in the differentiated loss, the index in each enclosing call
and loop, and its operator; `14/const0`, `14/row1`, `14/carry0` and `14/stack2` are operands and
results of the loop that is equation 14. `inputs` has for each operand the entries of its dims, as a
sharding rule has, and last "partial:tensor" for a sum of which each device keeps its term; `[]`
leaves the operand open. `traced` identifies the differentiated loss: strategies found for another
model, or by another version of JAX, are refused.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plurax import errors

Entries = tuple[Any, ...]
"""For each dim None, an axis or a tuple of axes; then `"partial:AXIS"` for partial sums."""

REPLICATED = "replicated"
"""How TOML spells None, the entry of a dim that is not split."""

PARTIAL = "partial:"
_EQUATION = re.compile(r"\d+(/\d+)*(/(const|row|carry|stack)\d+)? \S+")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The shard strategy of one equation.

    **Fields:**

    - `equation`: its path and its operator, such as `"14/3 dot_general"`.
    - `inputs`: for each operand its entries; `()` leaves an operand open.
    - `where`: the line of the model's code, or of which value a loop's operand is, for the reader.

    >>> Strategy("14/3 dot_general", ((None, "tensor"), ("tensor", None)))
    Strategy(equation='14/3 dot_general', inputs=((None, 'tensor'), ('tensor', None)), where='')
    """

    equation: str
    inputs: tuple[Entries, ...]
    where: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.equation, str) or not _EQUATION.fullmatch(self.equation):
            raise errors.PlanError(
                f"the plan has a strategy for equation {self.equation!r}: an equation is a path "
                "and an operator, such as '14/3 dot_general', or an operand of a loop, such as "
                "'14/carry0 scan'."
            )
        if not isinstance(self.inputs, list | tuple):
            raise errors.strategy_wrong_entries(self.equation, self.inputs)
        entries = tuple(_entries(self.equation, one) for one in self.inputs)
        object.__setattr__(self, "inputs", entries)
        object.__setattr__(self, "where", str(self.where))

    @property
    def path(self) -> str:
        """The path of the equation, or of the operand of a loop."""
        return self.equation.partition(" ")[0]

    @property
    def operator(self) -> str:
        """The name of the equation's primitive; of a loop's operand `scan`."""
        return self.equation.partition(" ")[2]

    def __str__(self) -> str:
        """Return the strategy for a reader.

        >>> print(Strategy("8/row2 scan", ((None, "tensor"),), "each row of blocks/mlp_in"))
        each row of blocks/mlp_in: dim 1 over tensor
        >>> print(Strategy("4 gather", ((None, None), ()), "model.py:9 (embed)"))
        model.py:9 (embed), gather: replicated; as it comes
        """
        last = self.path.rpartition("/")[2]
        name = f", {self.operator}" + ("" if last.isdigit() else f", {last}")
        # A search says what the operand of a loop is.
        name = "" if self.where and not last.isdigit() else name
        what = self.where or f"equation {self.path}"
        return f"{what}{name}: {'; '.join(map(entries_text, self.inputs))}"


@dataclasses.dataclass(frozen=True)
class Strategies:
    """The strategies that a plan pins.

    **Fields:** `traced`, identifies the differentiated loss; `equations`, the `Strategy` of each
    equation where it is not the default.
    """

    traced: str
    equations: tuple[Strategy, ...]

    def __post_init__(self) -> None:
        value = self.equations
        if not isinstance(self.traced, str) or not isinstance(value, Sequence):
            raise errors.strategies_not_a_table(value)
        try:
            equations = [Strategy(**one) if isinstance(one, Mapping) else one for one in value]
        except TypeError:
            raise errors.strategies_not_a_table(value) from None
        if not all(isinstance(one, Strategy) for one in equations):
            raise errors.strategies_not_a_table(value)
        object.__setattr__(self, "equations", tuple(equations))

    @classmethod
    def of(cls, value: Any) -> "Strategies":
        """Return strategies, or those of a table read from TOML. Raises `PlanError`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or set(value) != {"traced", "equations"}:
            raise errors.strategies_not_a_table(value)
        return cls(**value)

    def table(self) -> dict[str, Any]:
        """Return them as a table of TOML, which `of` takes."""
        equations = []
        for strategy in self.equations:
            row = {"equation": strategy.equation, "inputs": spelled(strategy.inputs)}
            equations.append({**row, "where": strategy.where} if strategy.where else row)
        return {"traced": self.traced, "equations": equations}

    def __len__(self) -> int:
        return len(self.equations)

    def lines(self, most: int = 12) -> list[str]:
        """Return them for a reader: how many there are, then a line for each, at most so many.

        Equations of equal layers that are computed alike share a line.
        """
        counts = Counter(map(str, self.equations))
        lines = [f"{text}{f' ({n} times)' if n > 1 else ''}" for text, n in counts.items()]
        if len(lines) > most:
            lines[most - 1 :] = [f"and {len(lines) - most + 1} more"]
        number = f"{len(self)} equation{'s are' if len(self) != 1 else ' is'}"
        return [f"{number} computed in another way than the default", *lines]


def axes_of(entries: Entries) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """Return the axes of each dim, and those over which the value is a partial sum.

    >>> axes_of((None, "tensor", "partial:data"))
    (((), ('tensor',)), frozenset({'data'}))
    """
    partial = [e for e in entries if isinstance(e, str) and e.startswith(PARTIAL)]
    dims = entries[: len(entries) - len(partial)]
    return tuple(_names(entry) for entry in dims), frozenset(e[len(PARTIAL) :] for e in partial)


def entries_of(dims: Sequence[tuple[str, ...]], partial: frozenset[str]) -> Entries:
    """Return the entries of a sharding: the inverse of `axes_of`.

    >>> entries_of(((), ("tensor",)), frozenset({"data"}))
    (None, 'tensor', 'partial:data')
    """
    given = (None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims)
    return (*given, *(PARTIAL + axis for axis in sorted(partial)))


def spelled(entry: Any) -> Any:
    """Return an entry, or a tuple of them, as a TOML file has it, which has neither None nor `...`.

    >>> spelled((..., None, ("tensor",)))
    ('...', 'replicated', ('tensor',))
    """
    if isinstance(entry, tuple):
        return tuple(map(spelled, entry))
    return REPLICATED if entry is None else "..." if entry is ... else entry


def entries_text(entries: Entries) -> str:
    """Return the entries of a sharding for a reader; `()` leaves an operand as it comes.

    >>> entries_text((None, ("data", "tensor"))), entries_text(("partial:tensor",))
    ('dim 1 over data, tensor', 'partial over tensor')
    """
    if not entries:
        return "as it comes"
    dims, partial = axes_of(entries)
    parts = [f"dim {dim} over {', '.join(axes)}" for dim, axes in enumerate(dims) if axes]
    parts += [f"partial over {axis}" for axis in sorted(partial)]
    return ", ".join(parts) or "replicated"


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _entries(equation: str, listed: Any) -> Entries:
    """Return the entries of one operand. Raises `PlanError` for other values."""
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise errors.strategy_wrong_entries(equation, listed)
    entries = []
    for entry in listed:
        several = isinstance(entry, list | tuple)
        for name in entry if several else (entry,):
            if name is not None and not isinstance(name, str):
                raise errors.strategy_wrong_entries(equation, listed)
        entries.append(tuple(entry) if several else None if entry == REPLICATED else entry)
    return tuple(entries)


def sharding_rules(shardings: Any) -> tuple[tuple[str, Entries], ...]:
    """Return sharding rules as a tuple of pairs, the first of equal patterns, which counts.

    Raises `PlanError` for other values.
    """
    pairs = shardings.items() if isinstance(shardings, Mapping) else shardings
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | bytes):
        raise errors.plan_shardings_not_rules(shardings)
    rules: dict[str, Entries] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise errors.plan_shardings_not_rules(shardings)
        pattern, entries = pair
        if isinstance(entries, str) or not isinstance(entries, Sequence):
            raise errors.PlanError(
                f"Plan(shardings={{{pattern!r}: {entries!r}}}): a rule has one entry for each dim "
                "in a tuple, None for a dim that is not split or the name of a mesh axis: (None, "
                "'tensor')."
            )
        rules.setdefault(pattern, _rule(pattern, entries))
    return tuple(rules.items())


def _rule(pattern: str, entries: Sequence[Any]) -> Entries:
    entries = tuple(tuple(e) if isinstance(e, list) else e for e in entries)
    entries = tuple(_ENTRIES.get(e, e) if isinstance(e, str) else e for e in entries)
    named = entries[1:] if entries and entries[0] is ... else entries
    names = [name for e in named for name in (e if isinstance(e, tuple) else (e,))]
    wrong = [n for n in names if not (n is None or (isinstance(n, str) and n in RULE_AXES))]
    twice = [axis for axis in RULE_AXES if names.count(axis) > 1]
    if wrong or twice:
        raise errors.PlanError(
            f"Plan(shardings={{{pattern!r}: {entries!r}}}): a rule splits one dim over 'tensor', "
            "and one, the experts of a mixture, over 'data'; "
            f"{f'none over {wrong[0]!r}' if wrong else f'not two over {twice[0]!r}'}. For a dim "
            "that is not split write None, which is 'replicated' in a TOML file; ... may come "
            "first. To split all parameters over `data`, use zero=3."
        )
    return entries


RULE_AXES = ("tensor", "data")
"""The mesh axes that a rule may name."""

_ENTRIES = {REPLICATED: None, "...": ...}
"""The TOML spelling of entries that TOML has no value for."""
