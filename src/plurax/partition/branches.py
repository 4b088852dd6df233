"""Partition `cond` and `switch`.

Every branch must return its results in the same shardings, but each branch on its own may return
another. So the branches are evaluated abstractly first, one common sharding is chosen for each
result, and then the branches are traced again with their results resharded to it.

    mesh tensor=2; lax.cond(c, f, g, x), one result of shape (8, 32)

    f returns             g returns        common              resharding
    (None, tensor)        (None, None)     (None, tensor)      in g a slice, no bytes
    partial={tensor}      zeros            partial={tensor}    none
    partial={tensor}      (None, None)     (None, None)        in f an all-reduce
    zeros                 zeros            none: the result stays deferred
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from plurax.jaxpr.compat import open_jaxpr
from plurax.partition.loops import settle_shared, whole_over_data
from plurax.partition.values import Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding


class Branches:
    """One `cond` of a partitioned function.

    Devices that communicate in a branch must all take it. If the choice depends on a device's own
    rows, everything that the branches read is replicated over `data` before, and nothing in them
    communicates over `data`.
    """

    def __init__(self, divider: Any, eqn: Any, inputs: list[ValueVersions]) -> None:
        self.divider, self.eqn = divider, eqn
        self.branches = [open_jaxpr(branch) for branch in eqn.params["branches"]]
        self.index: ShardedValue = divider.reshard(inputs[0], TensorSharding(()))
        self.data_varying = self.index.data_varying
        self.operands = inputs[1:]
        settle_shared(divider, self.operands)
        # Before the choice, all devices still take part in the gathers.
        if self.data_varying:
            self.operands = [
                ValueVersions(whole_over_data(divider, cell)) for cell in self.operands
            ]

    def run(self) -> list[ValueVersions]:
        """Return the results of the branch that is taken."""
        with self.divider.apart(self.data_varying):
            left = [self._tried(branch) for branch in range(len(self.branches))]
            together = [self._joined(outputs) for outputs in zip(*left, strict=True)]
            arrays = iter(self._chosen(together))
        results: list[Output] = []
        for var, like in zip(self.eqn.outvars, together, strict=True):
            shape = tuple(var.aval.shape)
            if like is None:
                results.append(self.divider.zeros(shape, var.aval.dtype))
            else:
                results.append(ShardedValue(next(arrays), shape, *like))
        return [ValueVersions(result) for result in results]

    def _tried(self, branch: int) -> list[Output]:
        """Return the outputs of a branch for their shardings, by abstract evaluation."""
        left: list[Output] = []

        def run() -> list[Array]:
            left[:] = map(_output, self._evaluated(branch))
            return [output.array for output in left if isinstance(output, ShardedValue)]

        # Nothing has been emitted: the records of this evaluation are dropped.
        kept = len(self.divider.records)
        jax.eval_shape(run)
        del self.divider.records[kept:]
        return left

    def _evaluated(self, branch: int) -> list[ValueVersions]:
        """Evaluate a branch on the operands."""
        body, consts = self.branches[branch]
        operands = [cell.fresh() for cell in self.operands]
        cells: list[ValueVersions] = self.divider.evaluate(body, consts, operands)
        return cells

    def _joined(self, outputs: Sequence[Output]) -> tuple[TensorSharding, bool, bool] | None:
        """Choose the sharding, `data_varying` and `is_param` of a result; None if all are zeros."""
        if all(not isinstance(output, ShardedValue) and output.zero for output in outputs):
            return None
        # A choice that depends on the rows makes every result depend on them.
        data_varying = self.data_varying or any(output.data_varying for output in outputs)
        made = [output for output in outputs if isinstance(output, ShardedValue)]
        is_param = (
            self.index.is_param and len(made) == len(outputs) and all(v.is_param for v in made)
        )
        options = {value.sharding for value in made}
        zeros = all(isinstance(output, ShardedValue) or output.zero for output in outputs)
        if len(options) == 1 and zeros:
            sharding = next(iter(options))
        else:
            # A slice sends nothing, so the sharding with the most shards is the cheapest.
            whole = TensorSharding.replicated(len(outputs[0].shape))
            shards = [TensorSharding(option.dims) for option in options] or [whole]
            size = self.divider.axes.size
            sharding = max(sorted(shards, key=repr), key=lambda option: size(option.axes))
        return (sharding.without(["data"]) if data_varying else sharding), data_varying, is_param

    def _chosen(self, together: Sequence[Any]) -> list[Array]:
        """Run the branches under `lax.switch`, or under `lax.platform_dependent`."""

        def taking(branch: int) -> Any:
            def run() -> list[Array]:
                cells = self._evaluated(branch)
                return [
                    self._left(cell, like[0]).array
                    for cell, like in zip(cells, together, strict=True)
                    if like is not None
                ]

            return run

        taken = [taking(branch) for branch in range(len(self.branches))]
        platforms = self.eqn.params.get("branches_platforms")
        if platforms is None:
            return list(lax.switch(self.index.array, taken))
        named = {
            name: branch
            for names, branch in zip(platforms, taken, strict=True)
            for name in names or ("default",)
        }
        return list(lax.platform_dependent(**named))

    def _left(self, cell: ValueVersions, sharding: TensorSharding) -> ShardedValue:
        """Reshard one result of a branch to the common sharding."""
        if cell.deferred is not None:
            # Zeros on every device are also a partial sum that is zero.
            return self.divider.reshard(cell, TensorSharding(sharding.dims))
        return self.divider.reshard(cell, sharding)


def _output(cell: ValueVersions) -> Output:
    """Return a branch's result, still deferred if no sharding of it is cheaper than others."""
    late = cell.deferred
    return late if late is not None and late.free is None else cell.value
