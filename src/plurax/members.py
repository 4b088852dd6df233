"""Describe a population of networks: its seeds, hyperparameters and resampling, without devices."""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from plurax import errors
from plurax.resample import Everything, Resample
from plurax.validate import check_seed, whole_number

Hyper = dict[str, Any]
"""The hyperparameters of one member: scalars by name."""


MAX_MEMBERS = 100_000
"""The most members: their seeds and settings are listed in Python, and all are compiled at once."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A uniform distribution over `[low, high)`, or of the logarithm (`log=True`).

    Raises `MembersError` for bounds that are not finite and ascending.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        try:
            finite = math.isfinite(self.low) and math.isfinite(self.high)
        except TypeError:
            finite = False
        if not finite or not self.low < self.high or (self.log and self.low <= 0):
            name, least = ("log_uniform", "0 < ") if self.log else ("uniform", "")
            raise errors.MembersError(
                f"plurax.ensemble.{name}({self.low!r}, {self.high!r}): needs finite numbers, "
                f"{least}low < high."
            )

    def at(self, u: Any) -> Any:
        """Return the value at quantile `u`, elementwise."""
        if self.log:
            return np.exp(math.log(self.low) + u * (math.log(self.high) - math.log(self.low)))
        return self.low + u * (self.high - self.low)


def uniform(low: float, high: float) -> Distribution:
    """Return a distribution from which each member draws uniformly in `[low, high)`."""
    return Distribution(low, high)


def log_uniform(low: float, high: float) -> Distribution:
    """Return a distribution whose logarithm is drawn uniformly; `low` must be above 0."""
    return Distribution(low, high, log=True)


class Grid(dict[str, tuple[Any, ...]]):
    """The product of choices, by name; `grid` creates it."""

    def settings(self) -> list[Hyper]:
        """Return every combination, the last name changing fastest."""
        return [
            dict(zip(self, values, strict=True)) for values in itertools.product(*self.values())
        ]


def grid(**choices: Sequence[Any]) -> Grid:
    """Return every combination of choices, each to be trained with every seed.

    Raises `MembersError` for a choice that is not a non-empty list.

    >>> len(grid(learning_rate=[1e-3, 1e-2], momentum=[0.0, 0.9, 0.99]).settings())
    6
    """
    for name, values in choices.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise errors.MembersError(
                f"plurax.ensemble.grid({name}={values!r}): give a list of at least one value."
            )
    return Grid({name: tuple(values) for name, values in choices.items()})


class MemberArrays(NamedTuple):
    """Members as arrays `(K,)`, of NumPy or on devices: a pytree passed to a compiled program.

    **Fields:** `indices`, each member's index in the population; `seeds`; `sizes`, draws in a pass
    of its data, all uint32; `hyper`, by name.
    """

    indices: Any
    seeds: Any
    sizes: Any
    hyper: dict[str, Any]

    def take(self, indices: Any) -> "MemberArrays":
        """Return the members at some indices."""
        return jax.tree.map(lambda leaf: leaf[indices], self)


@dataclasses.dataclass(frozen=True)
class Members:
    """A population of networks, trained together in one program.

    A member depends on its index, its seed and its hyperparameters alone, not on the other
    members: a population can grow, and any member can be trained alone.

    **Fields:**

    - `seeds`: a number of members with the seeds 0, 1, 2, ..., or the seeds themselves (whole
      numbers from 0 to 2³²-1). A member's seed determines its initial parameters, dropout, order of
      data and resampling.
    - `hyper`: hyperparameters by name, passed to the task and the optimizer: a list with one value
      for each member, `uniform` or `log_uniform` to draw from, or one number for all; or a `grid`,
      each setting of which is trained with every seed (settings outer, seeds inner).
    - `resample`: `bootstrap()`, `kfold(n)` or `subsample(sizes)`; by default each member reads all
      rows.
    - `draw_seed`: the seed of drawn hyperparameters.
    - `indices`: only these members of the population; default all. `take` sets it.

    Raises `MembersError`.

    >>> members = Members(3, {"learning_rate": [0.1, 0.2, 0.3]})
    >>> members.count, members.hyper_of(2)
    (3, {'learning_rate': 0.3})
    >>> Members([7, 8], grid(learning_rate=[0.1, 0.2])).count
    4
    """

    seeds: int | Iterable[int] | None = None
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resample: Resample = Everything()  # noqa: RUF009  frozen
    draw_seed: int = 0
    indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", _kept_seeds(self.seeds))
        object.__setattr__(self, "draw_seed", check_seed(self.draw_seed))
        if not isinstance(self.hyper, Mapping):
            raise errors.MembersError(
                f"Members(hyper={self.hyper!r}): give hyperparameters by name, {{'learning_rate': "
                "[0.1, 0.2, 0.3]}, or plurax.ensemble.grid(learning_rate=[...])."
            )
        kept: Any = self.seeds or 0
        count = kept if isinstance(kept, int) else len(kept)
        if count > MAX_MEMBERS:
            raise errors.MembersError(
                f"{count:,} members: a population is compiled as one program, of at most "
                f"{MAX_MEMBERS:,}. Train it in several calls, each with some of the seeds: "
                "Members(range(0, 1000)), Members(range(1000, 2000)). plurax.max_members says how "
                "many fit a device."
            )
        seeds = self._seeds()
        if not seeds or self.indices == ():
            raise errors.MembersError("Members(seeds=...): a population needs at least one member.")
        for seed in seeds:
            number = whole_number(seed, 0)
            if number is None or number >= 2**32:
                raise errors.MembersError(
                    f"Members: the seed {seed!r} is not a whole number from 0 to 2**32 - 1."
                )
        for name, values in {} if isinstance(self.hyper, Grid) else self.hyper.items():
            if _is_list(values) and len(values) != self._all:
                raise errors.MembersError(
                    f"Members: the hyperparameter {name!r} has {len(values)} values for "
                    f"{self._all} members; a list has one value for each member. For every "
                    f"combination of some values write hyper=plurax.ensemble.grid({name}=[...]), "
                    "to draw from a range plurax.ensemble.uniform(low, high)."
                )
        for index in self.indices or ():
            if not 0 <= index < self._all:
                raise errors.member_not_there(index, self._all)

    def _seeds(self) -> list[int]:
        if self.seeds is None:
            if isinstance(self.hyper, Grid):
                return [0]
            lengths = [len(values) for values in self.hyper.values() if _is_list(values)]
            if not lengths:
                raise errors.MembersError(
                    "Members(...) does not say how many members there are; give seeds=100, or a "
                    "list of seeds, or a list of values for a hyperparameter, or "
                    "hyper=plurax.ensemble.grid(...)."
                )
            return list(range(lengths[0]))
        return list(range(self.seeds) if isinstance(self.seeds, int) else self.seeds)

    @property
    def _all(self) -> int:
        settings = len(self.hyper.settings()) if isinstance(self.hyper, Grid) else 1
        return settings * len(self._seeds())

    def _indices(self) -> np.ndarray:
        return np.arange(self._all) if self.indices is None else np.asarray(self.indices)

    @property
    def count(self) -> int:
        """The number of members."""
        return self._all if self.indices is None else len(self.indices)

    def take(self, indices: Sequence[int]) -> "Members":
        """Return some of these members; their seeds and hyperparameters are unchanged.

        Index 0 is the first of these members, whatever its index in the population. Raises
        `MembersError` for an index out of range.

        >>> Members(100).take([40]).seed_of(0)
        40
        """
        population = self._indices()
        taken = tuple(int(population[self._checked(index)]) for index in indices)
        return dataclasses.replace(self, indices=taken)

    def hyper_table(self) -> dict[str, np.ndarray]:
        """Return each hyperparameter's values, shape `(count,)`. Raises `MembersError`."""
        if isinstance(self.hyper, Grid):
            settings = [one for one in self.hyper.settings() for _ in self._seeds()]
            columns = {name: [one[name] for one in settings] for name in self.hyper}
        else:
            columns = dict(self.hyper)
        return {name: self._column(name, values)[self._indices()]
                for name, values in columns.items()}  # fmt: skip

    def _column(self, name: str, values: Any) -> np.ndarray:
        if isinstance(values, Distribution):
            # Draw from one generator per name: the first draws are the same when the population
            # grows.
            rng = np.random.default_rng([self.draw_seed, zlib.crc32(name.encode())])
            return values.at(rng.random(self._all))
        column = np.asarray(values if _is_list(values) else [values] * self._all)
        if column.ndim != 1 or column.dtype.kind not in "fiub":
            raise errors.MembersError(
                f"Members: the hyperparameter {name!r} is {values!r}; inside one program it must "
                "be a number for each member. What changes shapes or code (a width, the name of an "
                "optimizer) goes into the shapes of plurax.sweep."
            )
        return column

    def hyper_of(self, member: int) -> Hyper:
        """Return the hyperparameters of the member at a position, as Python numbers."""
        index = self._checked(member)
        return {name: values[index].item() for name, values in self.hyper_table().items()}

    def hyper_arrays(self) -> dict[str, np.ndarray]:
        """Return `hyper_table` in the dtypes of a compiled program. Raises `MembersError`."""
        return {name: _canonical(name, values) for name, values in self.hyper_table().items()}

    @property
    def hyper_dtypes(self) -> dict[str, Any]:
        """The dtypes of the hyperparameters inside a compiled program, by name."""
        return {name: values.dtype for name, values in self.hyper_arrays().items()}

    def seed_of(self, member: int) -> int:
        """Return the seed of the member at a position."""
        seeds = self._seeds()
        return int(seeds[int(self._indices()[self._checked(member)]) % len(seeds)])

    def _checked(self, member: int) -> int:
        index = whole_number(member, 0)
        if index is None or index >= self.count:
            raise errors.member_not_there(member, self.count)
        return index

    def epoch_length(self, rows: int) -> int:
        """Return the draws in an epoch over data of `rows` rows: the longest pass of any member."""
        return max(self.resample.size(rows, int(index)) for index in self._indices())

    def arrays(self, rows: int) -> MemberArrays:
        """Return all members as arrays, for data of `rows` rows. Raises `BatchError`."""
        indices, seeds = self._indices(), np.asarray(self._seeds())
        return MemberArrays(
            indices.astype(np.uint32),
            seeds[indices % len(seeds)].astype(np.uint32),
            np.asarray([self.resample.size(rows, int(index)) for index in indices], np.uint32),
            self.hyper_arrays(),
        )

    def table(self) -> list[dict[str, Any]]:
        """Return the index, seed and hyperparameters of each member, one dict per member."""
        indices, seeds = self._indices(), self._seeds()
        hyper = {name: column.tolist() for name, column in self.hyper_table().items()}
        return [
            {
                "member": int(index),
                "seed": int(seeds[index % len(seeds)]),
                **{name: column[position] for name, column in hyper.items()},
            }
            for position, index in enumerate(indices)
        ]


def _kept_seeds(seeds: Any) -> int | Sequence[int] | None:
    """Return the number of members, or their seeds, as a tuple if they could be read only once."""
    count = whole_number(seeds, 0)
    if seeds is None or count is not None:
        return count
    listed = isinstance(seeds, Iterable) and getattr(seeds, "ndim", 1) > 0
    if not listed or isinstance(seeds, str | bytes):
        raise errors.MembersError(
            f"Members(seeds={seeds!r}): give a number of members, a whole number ≥ 1, or a list of "
            "their seeds."
        )
    return seeds if isinstance(seeds, Sequence) else tuple(seeds)


def _is_list(values: Any) -> bool:
    listed = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return listed or getattr(values, "ndim", 0) > 0


def _canonical(name: str, values: np.ndarray) -> np.ndarray:
    """Cast values to JAX's dtype. Raises `MembersError` if that changes more than rounding does."""
    with np.errstate(over="ignore"):
        cast = values.astype(jax.dtypes.canonicalize_dtype(values.dtype))
    wrong = cast != values if values.dtype.kind in "iu" else np.isinf(cast) & np.isfinite(values)
    if wrong.any():
        value = values[int(np.argmax(wrong))]
        raise errors.MembersError(
            f"Members: the hyperparameter {name!r} holds {value} as {values.dtype}, and JAX "
            f"computes in {cast.dtype}, which cannot represent it. Make it smaller, or call "
            "jax.config.update('jax_enable_x64', True) before anything else."
        )
    return cast
