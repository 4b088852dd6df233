"""Run the partitioner without executing anything, while no primitive can be applied."""

from unittest import mock

import jax
from jax.extend.core import Primitive

from plurax.partition.partitioner import plan_partition
from plurax.partition.values import is_sharded_value


def planned(fun, partitioner, args):
    """The facts of the results, and the collectives, of `plan_partition`.

    Functions are still traced to jaxprs, which is not what is tested here.
    """
    traced = partitioner.traced

    def refuse(self, *args, **params):
        raise AssertionError(f"{self.name} was applied while planning")

    refusing = mock.patch.object(Primitive, "bind", refuse)

    def trace(*args):
        refusing.stop()
        try:
            return traced(*args)
        finally:
            refusing.start()

    with mock.patch.object(partitioner, "traced", trace):
        refusing.start()
        try:
            out, records = plan_partition(fun, partitioner, args)
        finally:
            refusing.stop()
    assert not partitioner.records
    return facts(out), records


def facts(values):
    """What is known of `ShardedValue`s without their arrays, and the shards' shapes."""
    return jax.tree.map(
        lambda v: (v.shape, *v.kind, v.array.shape, v.dtype), values, is_leaf=is_sharded_value
    )
