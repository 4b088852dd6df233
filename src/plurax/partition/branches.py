"""Partition `cond` and `switch`.

Every branch must return its results in the same shardings, but each branch on its own may return
another. So the branches are planned first, executing nothing, one common sharding is chosen for
each result, and then the branches are executed with their results resharded to it.

    mesh tensor=2; lax.cond(c, f, g, x), one result of shape (8, 32)

    f returns             g returns        common              resharding
    (None, tensor)        (None, None)     (None, tensor)      in g a slice, no bytes
    partial={tensor}      zeros            partial={tensor}    none
    partial={tensor}      (None, None)     (None, None)        in f an all-reduce
    zeros                 zeros            none: the result stays deferred
"""

import functools
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from plurax.jaxpr.compat import open_jaxpr
from plurax.partition.loops import reduce_shared, replicated_over_data
from plurax.partition.values import Output, ShardedValue, ValueVersions
from plurax.sharding.spec import TensorSharding


class Branches:
    """One `cond` of a partitioned function.

    Devices that communicate in a branch must all take it. If the choice depends on a device's own
    rows, everything that the branches read is replicated over `data` before, and nothing in them
    communicates over `data`.
    """

    def __init__(self, partitioner: Any, eqn: Any, inputs: list[ValueVersions]) -> None:
        self.partitioner, self.eqn = partitioner, eqn
        self.branches = [open_jaxpr(branch) for branch in eqn.params["branches"]]
        self.index: ShardedValue = partitioner.reshard(inputs[0], TensorSharding(()))
        self.data_varying = self.index.data_varying
        self.operands = inputs[1:]
        reduce_shared(partitioner, self.operands)
        # Before the choice, all devices still take part in the gathers.
        if self.data_varying:
            self.operands = [
                ValueVersions(replicated_over_data(partitioner, one)) for one in self.operands
            ]

    def run(self) -> list[ValueVersions]:
        """Return the results of the branch that is taken."""
        with self.partitioner.apart(self.data_varying):
            with self.partitioner.planning():
                planned = [[*map(self._output, self._evaluated(*one))] for one in self.branches]
            common = [self._common(outputs) for outputs in zip(*planned, strict=True)]
            arrays = iter(self._executed(common))
        results: list[Output] = []
        for var, kind in zip(self.eqn.outvars, common, strict=True):
            shape = tuple(var.aval.shape)
            if kind is None:
                results.append(self.partitioner.zeros(shape, var.aval.dtype))
            else:
                results.append(ShardedValue(next(arrays), shape, *kind))
        return [ValueVersions(result) for result in results]

    def _evaluated(self, body: Any, consts: Sequence[Any]) -> list[ValueVersions]:
        """Evaluate a branch on the operands."""
        operands = [versions.fresh() for versions in self.operands]
        results: list[ValueVersions] = self.partitioner.evaluate(body, consts, operands)
        return results

    def _output(self, versions: ValueVersions) -> Output:
        """Return a branch's result, deferred if no sharding of it is cheaper than others."""
        deferred = versions.deferred
        if deferred is not None and deferred.free is None:
            return deferred
        value: ShardedValue = self.partitioner.value(versions)
        return value

    def _common(self, outputs: Sequence[Output]) -> tuple[TensorSharding, bool, bool] | None:
        """Choose the sharding, `data_varying` and `is_param` of a result; None if all are zeros."""
        if all(not isinstance(output, ShardedValue) and output.zero for output in outputs):
            return None
        # A choice that depends on the rows makes every result depend on them.
        data_varying = self.data_varying or any(output.data_varying for output in outputs)
        values = [output for output in outputs if isinstance(output, ShardedValue)]
        created = len(values) == len(outputs)
        is_param = self.index.is_param and created and all(value.is_param for value in values)
        options = {value.sharding for value in values}
        zeros = all(isinstance(output, ShardedValue) or output.zero for output in outputs)
        if len(options) == 1 and zeros:
            sharding = next(iter(options))
        else:
            # A slice sends nothing, so the sharding with the most shards is the cheapest.
            whole = TensorSharding.replicated(len(outputs[0].shape))
            shards = [TensorSharding(option.dims) for option in options] or [whole]
            size = self.partitioner.axes.size
            sharding = max(sorted(shards, key=repr), key=lambda option: size(option.axes))
        return (sharding.without(["data"]) if data_varying else sharding), data_varying, is_param

    def _executed(self, common: Sequence[Any]) -> list[Array]:
        """Run the branches, with each result in the common sharding."""

        def executed(body: Any, consts: Sequence[Any]) -> list[Array]:
            results = zip(self._evaluated(body, consts), common, strict=True)
            return [self._resharded(value, kind[0]).array for value, kind in results if kind]

        branches = [functools.partial(executed, *branch) for branch in self.branches]
        platforms = self.eqn.params.get("branches_platforms")
        return list(self.partitioner.executor.switch(self.index.array, branches, platforms))

    def _resharded(self, versions: ValueVersions, sharding: TensorSharding) -> ShardedValue:
        """Reshard one result of a branch to the common sharding."""
        if versions.deferred is not None:
            # Zeros on every device are also a partial sum that is zero.
            sharding = TensorSharding(sharding.dims)
        value: ShardedValue = self.partitioner.reshard(versions, sharding)
        return value


def cpu_branch(eqn: Any) -> Any:
    """Return the only branch of `lax.platform_dependent` that is compiled for the CPU, or None."""
    platforms = eqn.params.get("branches_platforms") or ()
    branches = zip(platforms, eqn.params["branches"], strict=False)
    return next((branch for names, branch in branches if not names or "cpu" in names), None)
