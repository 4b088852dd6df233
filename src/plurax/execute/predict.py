"""Run inference over any number of inputs, chunk by chunk, and stream outputs to the host.

A chunk has the program's row count, the last one padded. Dispatch returns before the device has
finished, so the copy of one chunk's outputs overlaps with the computation of the next. Example,
inputs `(10, 3)`, `chunk=4`, outputs `(10, 2)`:

    dispatch rows 0..3          -> pending
    dispatch rows 4..7          -> pending     both queued on the device
    dispatch rows 8..9 + 2 pads -> pending     three pending: copy rows 0..3 to out[0:4]
    no more inputs                             copy out[4:8], then out[8:10] without the pads
"""

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.distributed.global_arrays import gather, least, one_at_a_time, process_count
from plurax.execute.compiled_functions import abstract_inference
from plurax.execute.compiler_options import jitted
from plurax.execute.coupling import check_predict
from plurax.execute.placement import Placement, is_arrays, leading_dim, select_rows
from plurax.execute.program_cache import shapes_key
from plurax.execute.rows_per_call import bounded, bytes_per_row, fewer_rows, more_rows
from plurax.execute.step_functions import StepFunctions
from plurax.mesh import split_rows
from plurax.plan import Plan
from plurax.sources.adapt import adapt, as_arrays
from plurax.sources.source import Reading, Source
from plurax.state import TrainState, check_not_donated
from plurax.task import Task
from plurax.validate import whole_number

IN_FLIGHT = 2
"""Chunks computing or queued while the outputs of an earlier one are copied to the host."""


class Predictor:
    """Computes outputs for any number of inputs, in a program compiled once per shape of inputs.

    **Arguments:** `functions`; `task`, of one network, and `like`, its state as
    `jax.ShapeDtypeStruct`s; `batch_size`, the number of rows of a call where none is given, unless
    there are many rows.
    """

    def __init__(
        self, functions: StepFunctions, task: Task, like: TrainState, batch_size: int
    ) -> None:
        self._functions, self._task, self._like = functions, task, like
        self._least = batch_size
        self._row_bytes: dict[Any, float] = {}
        # Each device runs a pipeline's microbatches, or all of its rows at once.
        shards = Plan(
            data=functions.mesh.shape["data"], microbatches=functions.plan.forward_microbatches
        )
        self._padded_size = shards.padded_size
        self._known: dict[Any, tuple[Placement, jax.stages.Compiled]] = {}

    def trace(self, inputs: PyTree, chunk: int | None) -> jax.stages.Traced:
        """Trace the outputs of `chunk` rows, by default the batch size, of inputs like these."""
        rows = bounded(chunk or self._least, leading_dim(inputs))
        return self._trace(self._placement(_like(inputs, rows), rows).abstract())

    def _trace(self, rows: PyTree) -> jax.stages.Traced:
        functions = self._functions
        check_predict(self._task, self._like, rows, functions.mesh)
        out = functions.outputs_sharding
        predict = jitted(functions.predict, functions.options, out_shardings=out)
        traced: jax.stages.Traced = predict.trace(*abstract_inference(functions), rows)
        return traced

    def __call__(
        self, states: tuple[PyTree, ...], inputs: PyTree | Iterable[PyTree], chunk: int | None
    ) -> Any:
        """Return NumPy arrays for a tree of arrays; for an iterable of trees an iterator
        of them.
        """
        inputs = adapt("inputs", inputs)
        rows = None if chunk is None else whole_number(chunk)
        if rows is None and chunk is not None:
            raise errors.BatchError(
                f"chunk={chunk!r}: give the number of inputs at a time, a whole number ≥ 1, or "
                "leave it out for the batch size."
            )
        if isinstance(inputs, Source):
            inputs = inputs.batches(Reading(rows or self._least), 0, 0)
        if not is_arrays(inputs):
            return map(self._functions.outputs, self._stream(states, iter(inputs), rows))
        inputs = as_arrays(inputs)
        outputs = next(self._stream(states, iter([inputs]), rows, alone=True))
        return self._functions.outputs(outputs)

    def _stream(
        self,
        states: tuple[PyTree, ...],
        batches: Iterator[PyTree],
        chunk: int | None,
        *,
        alone: bool = False,
    ) -> Iterator[PyTree]:
        """Yield the outputs of each of `batches`, or of the only one, which is `alone`."""
        first = next(batches, None)
        if first is None:
            return
        total = leading_dim(first)
        if chunk is not None:
            rows = bounded(chunk, total)
        elif alone and total < self._least:
            rows = fewer_rows(self._least, total)
        else:
            rows = self._choose(first)
        placement, compiled = self._program(first, rows)
        chained = map(as_arrays, itertools.chain([first], batches))

        def run(rows: PyTree) -> PyTree:
            check_not_donated(states)  # while the caller reads outputs, it may train on
            return compiled(*states, rows)

        yield from predict_stream(run, placement, chained)

    def own(self, states: tuple[PyTree, ...], inputs: PyTree, chunk: int | None) -> PyTree:
        """Return NumPy arrays for inputs of which each process gives its own.

        Every process runs as many programs as the one with the most inputs. Raises `BatchError`
        where processes share rows of a program, and for a population.
        """
        inputs = adapt("inputs", inputs)
        if self._functions.count is not None or not is_arrays(inputs):
            raise errors.BatchError(
                "predict(local=True) is for arrays of inputs, of one network. Of a population, and "
                "of an iterable, every process gives the same inputs and gets all outputs: leave "
                "local out."
            )
        inputs = as_arrays(inputs)
        chunk = bounded(chunk or self._least, -least(-leading_dim(inputs)) * process_count())
        placement, compiled = self._program(inputs, self._padded_size(chunk))
        share = placement.own_rows()
        if share is None:
            raise errors.own_rows_not_split(placement.size, process_count())
        check_not_donated(states)
        total, parts = leading_dim(inputs), []
        most = -least(-math.ceil(total / share))
        for call in range(most):
            rows = np.minimum(np.arange(call * share, (call + 1) * share), total - 1)
            piece = jax.tree.map(lambda leaf: select_rows(leaf, rows), inputs)  # noqa: B023
            outputs = one_at_a_time(compiled(*states, placement.place_own(piece).rows))
            parts.append(jax.tree.map(_own_rows, outputs))
        return jax.tree.map(lambda *each: np.concatenate(each)[:total], *parts)

    def _choose(self, inputs: PyTree) -> int:
        """Return the number of rows of a call for inputs of which nobody said it."""

        def row_bytes() -> float:
            if (key := shapes_key(_like(inputs, 1))) not in self._row_bytes:
                self._row_bytes[key] = bytes_per_row(
                    lambda n: self._trace(self._placement(_like(inputs, n), n).abstract()),
                    self._least,
                )
            return self._row_bytes[key]

        return more_rows(self._least, leading_dim(inputs), row_bytes)

    def _placement(self, like: PyTree, chunk: int) -> Placement:
        return Placement(like, self._padded_size(chunk), split_rows(self._functions.mesh))

    def _program(self, inputs: PyTree, chunk: int) -> tuple[Placement, jax.stages.Compiled]:
        like = _like(inputs, chunk)
        if (key := shapes_key(like)) not in self._known:
            placement = self._placement(like, chunk)
            compiled = self._trace(placement.abstract()).lower().compile()
            self._known[key] = (placement, compiled)
        return self._known[key]


def _like(inputs: PyTree, rows: int) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *np.shape(leaf)[1:]), leaf.dtype),
        as_arrays(inputs),
    )


def predict_stream(
    run: Callable[[PyTree], PyTree], placement: Placement, batches: Iterable[PyTree]
) -> Iterator[PyTree]:
    """Yield the outputs of each batch, in order and of its length, as NumPy arrays.

    `run` takes placed rows and returns without waiting; while it computes, the outputs of the
    previous chunk are copied to the host. Batches may have any number of rows.
    """
    pending: deque[tuple[int, int, PyTree]] = deque()
    outputs: PyTree = None

    def collect() -> bool:
        """Copy the oldest chunk to the host; return whether its batch is complete."""
        nonlocal outputs
        total, start, chunk = pending.popleft()
        if start == 0:
            outputs = jax.tree.map(
                lambda leaf: np.empty((total, *leaf.shape[1:]), leaf.dtype), chunk
            )
        jax.tree.map(lambda leaf, out: _copy_rows(leaf, out, start), chunk, outputs)
        return start + placement.size >= total

    for batch in batches:
        total = leading_dim(batch)
        for start in range(0, total, placement.size):
            cut = slice(start, min(start + placement.size, total))
            piece = jax.tree.map(operator.itemgetter(cut), batch)
            rows = run(placement.place(piece).rows)
            pending.append((total, start, rows if process_count() == 1 else gather(rows)))
            if len(pending) > IN_FLIGHT and collect():
                yield outputs
    while pending:
        if collect():
            yield outputs


def _own_rows(leaf: jax.Array) -> np.ndarray:
    """Return the rows of an array that are on this process's devices, in their order."""
    rows = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
    return np.concatenate([np.asarray(rows[start]) for start in sorted(rows)])


def _copy_rows(leaf: jax.Array, out: np.ndarray, start: int) -> None:
    """Copy the rows of a device array to `out[start:]`, shard by shard; drop rows past its end."""
    whole = leaf.is_fully_replicated
    for shard in leaf.addressable_shards[:1] if whole else leaf.addressable_shards:
        # Replicas hold equal rows: copy one of them.
        if whole or shard.replica_id == 0:
            first = start + (shard.index[0].start or 0)
            room = max(0, min(shard.data.shape[0], out.shape[0] - first))
            if room:
                place = (slice(first, first + room), *shard.index[1:])
                out[place] = np.asarray(shard.data)[:room]
