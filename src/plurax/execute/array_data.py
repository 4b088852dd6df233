"""Arrays that training reads by row, and the order in which it reads them.

A run that resumes must see the batches that it would have seen. The order is a pure function of
`(seed, member, epoch, position)`, so a `Position` (epoch, batch) is enough. Example, 5 rows,
batches of 2, `ragged="pad"`:

    epoch_order(0)    rows [[4 2] [0 3] [1 0]]  (3, 2)     counts [2 2 1]  (3,)
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, get_args

import jax
import numpy as np
from jaxtyping import Int, PyTree

from plurax import errors
from plurax.argument_check import text
from plurax.distributed.global_arrays import process_count
from plurax.execute.placement import Selection, leading_dim, select_rows
from plurax.execute.reads import EpochSpec
from plurax.members import Members
from plurax.resample import Everything, Resample, epoch_rows
from plurax.tree import with_rows
from plurax.validate import whole_number

Ragged = Literal["pad", "drop", "error"]


@dataclasses.dataclass(frozen=True)
class Position:
    """The place of a run in its data; part of every checkpoint, as JSON.

    **Fields:**

    - `epoch`: passes completed.
    - `batch`: batches taken in the current pass.
    - `iterator`: the state of a Grain iterator, if there is one.
    """

    epoch: int = 0
    batch: int = 0
    iterator: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return the position as JSON values; a Grain DataLoader's state, bytes, becomes text."""
        state = self.iterator
        if isinstance(state, bytes):
            state = {"bytes": state.decode("latin-1")}
        return {"epoch": self.epoch, "batch": self.batch, "iterator": state}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        """Return the position that `to_json` encoded."""
        if not {"epoch", "batch", "iterator"} <= {*values}:
            raise errors.argument_misfits(
                "plurax.train.Position.from_json", "values", text(values), "what `to_json` returned"
            )
        state = values["iterator"]
        if isinstance(state, dict) and set(state) == {"bytes"}:
            state = state["bytes"].encode("latin-1")
        return cls(values["epoch"], values["batch"], state)


def check_ragged(ragged: str) -> None:
    """Raise `BatchError` unless `ragged` is one of the policies."""
    if ragged not in get_args(Ragged):
        raise errors.BatchError(f"ragged={ragged!r}: choose 'pad', 'drop' or 'error'.")


@dataclasses.dataclass(frozen=True)
class ArrayData:
    """Batches drawn from arrays in memory, in a new order every epoch.

    The row at a place is a function of `(seed, member, epoch, position)` and the number of examples
    (`plurax.resample`), never of devices or plan.

    **Fields:** `arrays`, a tree with a common leading dim; `batch_size`; `seed`; `shuffle`;
    `ragged`, the treatment of a last, smaller batch; `resample` and `member`, to read as that
    member of a population does; `length`, draws in an epoch, default one pass of the member.

    Raises `BatchError` where `ragged` refuses the data.

    >>> data = ArrayData({"x": np.arange(5)}, batch_size=2, shuffle=False)
    >>> rows, counts = data.epoch_order(0)
    >>> rows.tolist(), counts.tolist()
    ([[0, 1], [2, 3], [4, 0]], [2, 2, 1])
    """

    arrays: PyTree
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    ragged: Ragged = "pad"
    resample: Resample = Everything()  # noqa: RUF009  frozen
    member: int = 0
    length: int | None = None
    local: ClassVar[bool] = False
    on_devices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ragged(self.ragged)
        if whole_number(self.batch_size) is None:
            raise errors.batch_size_not_positive(self.batch_size)
        examples = self.draws
        rest = examples % self.batch_size
        if rest and self.ragged == "error":
            raise errors.batch_ragged(rest, self.batch_size)
        if self.ragged == "drop" and examples < self.batch_size:
            raise errors.data_has_no_batches(
                f"{examples} examples are fewer than batch_size={self.batch_size}, "
                "and ragged='drop'"
            )

    @property
    def draws(self) -> int:
        """The number of draws in an epoch."""
        return self.length or self.resample.size(leading_dim(self.arrays), self.member)

    def read_by(self, members: Members) -> "ArrayData":
        """Return the data with a population's resampling and epoch length.

        Raises `BatchError` where a member's sample needs more rows than there are.
        """
        length = members.epoch_length(leading_dim(self.arrays))
        return dataclasses.replace(self, resample=members.resample, length=length)

    def abstract(self) -> "ArrayData":
        """Return the data with `jax.ShapeDtypeStruct`s for arrays."""
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.arrays)
        return dataclasses.replace(self, arrays=like)

    @property
    def epoch_spec(self) -> EpochSpec:
        """How members that have these data on their devices read them."""
        return EpochSpec(
            resample=self.resample,
            count=leading_dim(self.arrays),
            length=self.draws,
            batch_size=self.batch_size,
            steps=self.batches_per_epoch,
            shuffle=self.shuffle,
        )

    @property
    def batches_per_epoch(self) -> int:
        """The number of steps in an epoch."""
        full, rest = divmod(self.draws, self.batch_size)
        return full + (1 if rest and self.ragged == "pad" else 0)

    def example_batch(self) -> PyTree:
        """Return the shapes and dtypes of a full batch."""
        return with_rows(self.arrays, self.batch_size)

    def epoch_order(self, epoch: int) -> tuple[Int[np.ndarray, "S B"], Int[np.ndarray, "S"]]:
        """Return the rows `(S, B)` of an epoch's batches and how many are real `(S,)`; int64."""
        order = epoch_rows(
            self.resample,
            leading_dim(self.arrays),
            self.seed,
            self.member,
            epoch,
            length=self.draws,
            shuffle=self.shuffle,
            one_batch=self.draws <= self.batch_size,
        )
        steps = self.batches_per_epoch
        rows = np.zeros(steps * self.batch_size, np.int64)
        used = min(self.draws, rows.size)
        rows[:used] = order[:used]
        counts = np.full(steps, self.batch_size)
        counts[-1] = used - (steps - 1) * self.batch_size
        return rows.reshape(steps, self.batch_size), counts

    def batches(self, start: Position) -> Iterator[tuple[PyTree, Position]]:
        """Yield the batches of the epoch from `start` on, each with the position after it."""
        rows, counts = self.epoch_order(start.epoch)
        # Of several processes each reads only the rows of its own devices, when it places them.
        take = Selection if process_count() > 1 else select_rows
        for index in range(start.batch, len(counts)):
            chosen = rows[index, : counts[index]]
            batch = jax.tree.map(lambda leaf: take(leaf, chosen), self.arrays)  # noqa: B023
            yield batch, Position(start.epoch, index + 1)
