"""What holds for data of every library: one table of cases, one set of checks.

`tests/unit/test_sources.py` has the light libraries, `tests/integrations/test_data.py` the others.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px
from plurax.execute.placement import abstract_batch
from plurax.loop.data import as_data

ROWS, BATCH = 23, 4
TABLE = {
    "a": np.linspace(0, 1, ROWS, dtype=np.float32),
    "b": np.arange(ROWS) % 5,
    "y": np.arange(ROWS, dtype=np.float32),
}


def loss(params, batch, keys):
    # The leaves of a dict by name, of a tuple by place; a library may have cast whole numbers.
    a, b, y = (leaf.astype(jnp.float32) for leaf in jax.tree.leaves(batch))
    return (params[0] * a + params[1] * b - y) ** 2


TASK = px.Task(
    init=lambda key: jnp.zeros(2),
    loss=loss,
    predict=lambda params, batch: jax.tree.leaves(batch)[2] * 2,
)
SGD = optax.sgd(0.01)
"""One for all runs, which share its compiled programs."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of data.

    **Fields:**

    - `make`: returns the data from a folder, as a new process would.
    - `order`: `"ours"`, that of arrays; `"windows"`, ours within a part; `"theirs"`, in which
      case `native` yields the batches of a pass as one would read them without plurax.
    - `batched`: whether the data have batches, and `fit` needs no `batch_size`.
    """

    make: Callable[[Any], Any]
    order: str = "ours"
    native: Callable[[Any, int], Any] | None = None
    batched: bool = False

    def read(self, folder: Any, shuffle: bool = True) -> Any:
        """Return the data as `fit` reads them."""
        size = None if self.batched else BATCH
        data, _ = as_data(self.make(folder), batch_size=size, seed=3, shuffle=shuffle, ragged="pad")
        return data

    def whole(self, folder: Any) -> Any:
        """Return all examples as one batch."""
        batches = [batch for batch, _ in self.read(folder).batches(px.train.Position())]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def values(batch: Any) -> list[list[float]]:
    """Return the rows of a batch, sorted by nothing."""
    return np.stack([np.asarray(leaf, float) for leaf in jax.tree.leaves(batch)], 1).tolist()


def epoch(data: Any, number: int, start: int = 0) -> list[Any]:
    at = px.train.Position(number, start)
    return [values(batch) for batch, _ in data.batches(at)]


def check_batches(case: Case, folder: Any) -> None:
    """The batches are those of the library's own loop, or those of arrays, in every epoch."""
    whole = sorted(values(TABLE))
    data, passes = case.read(folder), []
    for number in range(3):
        found = epoch(data, number)
        assert [len(batch) for batch in found] == [4, 4, 4, 4, 4, 3]
        assert sorted(itertools.chain(*found)) == whole
        passes.append(found)
        if case.native is not None:
            assert found == [values(batch) for batch in case.native(case.make(folder), number)]
    assert passes == [epoch(case.read(folder), number) for number in range(3)]
    assert data.batches_per_epoch in (6, None)
    arrays, _ = as_data(TABLE, batch_size=BATCH, seed=3, shuffle=True, ragged="pad")
    if case.order == "ours":
        assert passes == [epoch(arrays, number) for number in range(3)]
    if case.order != "theirs":
        assert passes[0] != passes[1] != passes[2]
        in_order = case.read(folder, shuffle=False)
        rows = values(TABLE)
        for number in range(2):
            assert list(itertools.chain(*epoch(in_order, number))) == rows


@functools.cache
def _program(structure: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]) -> px.Program:
    """Return the program for batches of these shapes, compiled once for all kinds of data."""
    batch = jax.tree.unflatten(structure, leaves)
    return px.compile(TASK, optax.adam(0.1), px.Plan(data=2), batch)


def check_resume(case: Case, folder: Any) -> None:
    """From the position after every step, data opened anew give the same end, in bits."""
    data = case.read(folder)
    like = jax.tree.map(lambda leaf: leaf[:BATCH], next(iter(data.batches(px.train.Position())))[0])
    leaves, structure = jax.tree.flatten(abstract_batch(like))
    program = _program(structure, tuple(leaves))

    def run(data: Any, state: Any, start: px.train.Position) -> list[Any]:
        found = []
        arguments = {"epochs": 2, "resident": False, "start": start, "checkpoint_every": 1}
        for output in px.train.train_iter(program, state, data, **arguments):
            kept = jax.tree.map(np.array, jax.tree.map(_plain, output.state))
            found.append((kept, output.position.to_json(), output.state.params.tolist()))
        return found

    steps = run(case.read(folder), program.init(seed=0), px.train.Position())
    assert len(steps) == 12
    for number, (_, position, _) in enumerate(steps[:-1]):
        state = _like(program.init(seed=0), steps[number][0])
        again = run(case.read(folder), state, px.train.Position.from_json(position))
        assert [step[2] for step in again] == [step[2] for step in steps[number + 1 :]]


def _plain(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _like(state: Any, saved: Any) -> Any:
    def leaf(now: Any, value: Any) -> Any:
        is_key = jnp.issubdtype(now.dtype, jax.dtypes.prng_key)
        array = jax.random.wrap_key_data(jnp.asarray(value)) if is_key else jnp.asarray(value)
        return jax.device_put(array, now.sharding)

    return jax.tree.map(leaf, state, saved)


def check_fit(case: Case, folder: Any, output: Any) -> None:
    """`fit` trains and evaluates on it, predicts for it, and goes on where it was stopped."""
    options: dict[str, Any] = {"batch_size": None if case.batched else BATCH, "seed": 3}
    options |= {"progress": False, "plan": px.Plan(data=2)}
    made = case.make
    whole = px.fit(TASK, SGD, made(folder), epochs=2, evaluation=made(folder),
                   **options)  # fmt: skip
    assert [row["examples"] for row in whole.history] == [ROWS, ROWS]
    wanted = whole.program.evaluate(whole.state, case.whole(folder))
    np.testing.assert_allclose(whole.history[-1]["eval_loss"], wanted["loss"], rtol=1e-5)
    px.fit(TASK, SGD, made(folder), epochs=1, output=output, **options)
    again = px.fit(TASK, SGD, made(folder), epochs=2, output=output, resume=True,
                   **options)  # fmt: skip
    assert again.state.params.tolist() == whole.state.params.tolist()
    found = whole.program.predict(whole.state, made(folder), chunk=BATCH)
    if not isinstance(found, np.ndarray):
        found = np.concatenate(list(found))
    assert sorted(found.tolist()) == (TABLE["y"] * 2).tolist()


class Contract:
    """What holds for every case; a file's class of this name gives its cases."""

    def test_the_batches_are_those_of_arrays_or_of_the_librarys_own_loop(self, case, tmp_path):
        check_batches(case, tmp_path)

    def test_a_run_resumes_after_every_step(self, case, tmp_path):
        check_resume(case, tmp_path)

    def test_fit_trains_evaluates_predicts_and_resumes(self, case, tmp_path):
        (tmp_path / "data").mkdir()
        check_fit(case, tmp_path / "data", tmp_path / "run")


def check_members(case: Case, folder: Any) -> None:
    """Each member draws its own rows, as of arrays."""
    members = px.Members(3, resample=px.ensemble.bootstrap())
    options: dict[str, Any] = {"members": members, "batch_size": BATCH, "progress": False}
    wanted = px.fit(TASK, SGD, TABLE, **options).state.params
    found = px.fit(TASK, SGD, case.make(folder), **options).state.params
    np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(found, axis=0)) == 3
