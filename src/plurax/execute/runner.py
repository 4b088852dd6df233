"""Run steps on batches of every size, in one program of padded rows or in a program for each size.

A compiled step has one number of rows. Rows that repeat examples fill them where they change no
result: where the loss is one per example, and where a coupled loss reads its mask
(`coupling.may_pad`). Otherwise each size needs a program of its own. Example, compiled for 8 rows,
batches of 8, 8 and 3:

    PaddedRunner    one program; of the third batch's rows 3 are real
    ExactRunner     a `PaddedRunner` of 8 rows, and for the third batch one of 3: nothing is padded

`Program` asks either which runner takes a batch (`for_batch`, `for_rows`), and for a loop.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.array_data import ArrayData
from plurax.execute.compiled_functions import CompiledFunctions, CompileRecord, check_constants
from plurax.execute.dispatch_limiter import DispatchLimiter
from plurax.execute.epoch_loop import equal_sizes
from plurax.execute.mask import mask_not_read
from plurax.execute.placement import Placed, Placement, leading_dim
from plurax.execute.state_store import StateStore
from plurax.execute.step import Metrics
from plurax.execute.step_functions import StepFunctions
from plurax.state import TrainState, check_donatable
from plurax.user_frames import warn

Order = tuple[Any, ...]
"""The order of an epoch: rows and counts on the devices, or `()` where members have their own."""


class PaddedRunner:
    """Runs batches in one program, padded to its rows.

    **Arguments:** `functions`; `placement`, of a batch; `data`, the shapes of the arrays that
    members read themselves, or None.

    **Attributes:** `compiled`, `states`, `placement`, and `in_flight`, of all that it dispatches.
    """

    def __init__(
        self, functions: StepFunctions, placement: Placement, data: ArrayData | None = None
    ) -> None:
        self.placement, self._functions = placement, functions
        self.compiled = CompiledFunctions(functions, placement, data)
        self.states = StateStore(functions)
        self.in_flight = DispatchLimiter(functions.mesh)

    def of(self, functions: StepFunctions) -> "PaddedRunner":
        """Return the runner of as many other members."""
        other = copy.copy(self)
        other._functions = functions
        return other

    def for_batch(self, batch: PyTree) -> "PaddedRunner":
        """Return this runner: what does not fit, `placement` refuses."""
        return self

    def for_rows(self, rows: PyTree) -> "PaddedRunner":
        """Return this runner."""
        return self

    def step(self, state: TrainState, placed: Placed) -> tuple[TrainState, Metrics]:
        """Update the state once from a padded batch."""
        state, metrics = self._run(self.compiled.step, state, *placed)
        return state, self._functions.trim(metrics)

    def record_of(self, compiled: jax.stages.Compiled) -> CompileRecord | None:
        """Return how a step or a loop was compiled, None where it is of another runner."""
        return self.compiled.record_of(compiled)

    def compile_loop(self, data: PyTree, order: Order) -> jax.stages.Compiled:
        """Return the compiled loop."""
        if order and isinstance(order[0], np.ndarray):  # of devices that are not here
            order = self.placement.place_order(*order)
        return self.compiled.loop(data, order)

    def loop(
        self, state: TrainState, data: PyTree, order: Order, first: int, stop: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """Run the compiled loop."""
        loop = self.compiled.loop(data, order)
        return self._run(loop, state, data, *order, np.int32(first), np.int32(stop))

    def _run(self, compiled: jax.stages.Compiled, state: TrainState, *args: Any) -> Any:
        if self._functions.mesh.size > 1 or getattr(state.step, "is_deleted", bool)():
            check_donatable(state)  # of one device the program raises, and looks cost 4% of a step
        state = self.states.from_canonical(state)
        try:
            state, metrics = compiled(state, *self._functions.arguments, *args)
        except (TypeError, ValueError, RuntimeError) as error:
            if not isinstance(error, jax.errors.JaxRuntimeError):  # which may be out of memory
                check_donatable(state)
            self.states.check(state)
            check_constants(error)
            raise
        self.in_flight.started(metrics["loss"])
        return state, metrics


class ExactRunner:
    """Runs each size of a batch in a program of its own, for a loss that allows no padding.

    **Arguments:** `whole`, the runner of the largest size; `of_size(size)`, which returns one of
    exactly this size, or raises; `unit`, by which sizes divide that are split over the devices.
    """

    def __init__(
        self, whole: PaddedRunner, of_size: Callable[[int], PaddedRunner], unit: int
    ) -> None:
        self._whole, self._of_size, self._unit = whole, of_size, unit
        self._runners = {whole.placement.size: whole}

    def of(self, functions: StepFunctions) -> "ExactRunner":
        """Return the runner of as many other members, which have one size of a batch only."""
        return ExactRunner(self._whole.of(functions), self._of_size, self._unit)

    def for_batch(self, batch: PyTree) -> PaddedRunner:
        """Return the runner of the batch's size."""
        return self._runner(self._whole.placement.check(batch))

    def for_rows(self, rows: PyTree) -> PaddedRunner:
        """Return the runner of as many rows."""
        return self._runner(leading_dim(rows))

    def record_of(self, compiled: jax.stages.Compiled) -> CompileRecord | None:
        """Return how a step or a loop of any size was compiled."""
        records = (one.record_of(compiled) for one in self._runners.values())
        return next((record for record in records if record), None)

    def compile_loop(self, data: PyTree, order: Order) -> jax.stages.Compiled:
        """Return the compiled loop; where sizes differ that of the first, and compile all."""
        if order and len(set(np.asarray(order[1]).tolist())) > 1:
            first, *_ = [one.compile_loop(data, part) for one, part, *_ in self._by_size(order)]
            return first
        return self._whole.compile_loop(data, order)

    def loop(
        self, state: TrainState, data: PyTree, order: Order, first: int, stop: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """Run a loop for each run of equal sizes in an epoch."""
        if not order or (np.asarray(order[1]) == self._whole.placement.size).all():
            return self._whole.loop(state, data, order, first, stop)
        every: dict[str, Any] = {}
        for runner, part, start, end in self._by_size(order):
            begin, finish = max(first, start), min(stop, end)
            if begin >= finish:
                continue
            state, metrics = runner.loop(state, data, part, begin - start, finish - start)
            for name, values in metrics.items():
                of_epoch = every.setdefault(name, np.zeros(len(order[1]), values.dtype))
                of_epoch[begin:finish] = values[begin - start : finish - start]
        return state, every

    def _by_size(self, epoch: Order) -> Iterator[tuple[PaddedRunner, Placed, int, int]]:
        """Yield, for each run of equal batch sizes of an epoch: its runner, order, start, end."""
        for size, rows, start, end in equal_sizes(*epoch):
            runner = self._runner(size)
            counts = np.full(end - start, size)
            yield runner, runner.placement.place_order(rows, counts), start, end

    def _runner(self, size: int) -> PaddedRunner:
        if size not in self._runners:
            runner, largest = self._of_size(size), self._whole.placement.size
            warn(mask_not_read(size, largest, self._unit), errors.MaskWarning)
            self._runners[size] = runner
        return self._runners[size]
