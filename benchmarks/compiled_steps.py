"""A step, of plurax or of plain JAX, that is compiled, placed and run alike."""

import abc
import statistics
import time
from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh

from plurax.collective import Collective
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.memory import memory


class CompiledStep(abc.ABC):
    """A compiled step of parameters and rows `x`.

    **Attributes:** `temporaries`, the bytes on one device; `sent`, its collectives, `trips` None of
    those in a loop whose length is data.
    """

    temporaries: int
    sent: Sequence[Collective]

    @abc.abstractmethod
    def start(self, params: Any, x: Any) -> None:
        """Place what the first step takes."""

    @abc.abstractmethod
    def step(self) -> None:
        """Run a step, and wait for it."""

    @property
    @abc.abstractmethod
    def params(self) -> Any:
        """The parameters, on the host."""


@final
class StepOfPlurax(CompiledStep):
    """A step of a `program` on batches `{"x": x}`, from its own first parameters, of seed 0."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.temporaries = program.memory().temporaries
        self.sent = collectives(program.compiled_step.as_text(), program.mesh)

    def start(self, params: Any, x: Any) -> None:
        """Place the rows."""
        self._state, self._batch = self.program.init(seed=0), {"x": x}

    def step(self) -> None:
        """Run a step, and wait for it."""
        self._state, _ = self.program.step(self._state, self._batch)
        jax.block_until_ready(self._state.params)

    @property
    def params(self) -> Any:
        """The parameters, on the host."""
        return jax.device_get(self._state.params)


@final
class StepOfJax(CompiledStep):
    """A `jitted` step of parameters and rows, with what it takes as `jax.ShapeDtypeStruct`s that
    have shardings."""

    def __init__(self, jitted: Any, params: Any, x: Any, mesh: Mesh) -> None:
        self._like = params, x
        self._compiled = jitted.lower(params, x).compile()
        self.temporaries = memory(self._compiled).temporaries
        self.sent = collectives(self._compiled.as_text(), mesh)

    def start(self, params: Any, x: Any) -> None:
        """Place parameters and rows."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._like)
        self._params, self._x = jax.device_put((params, x), shardings)

    def step(self) -> None:
        """Run a step, and wait for it."""
        self._params = jax.block_until_ready(self._compiled(self._params, self._x))

    @property
    def params(self) -> Any:
        """The parameters, on the host."""
        return jax.device_get(self._params)


def median_seconds(steps: Sequence[CompiledStep], rounds: int) -> list[float]:
    """Return the median processor seconds of a step of each, run in turns; they have started."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, taken in zip(steps, times, strict=True):
            started = time.process_time()
            step.step()
            taken.append(time.process_time() - started)
    return list(map(statistics.median, times))
