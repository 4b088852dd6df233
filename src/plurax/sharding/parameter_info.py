"""A row of a report: how one parameter and its optimizer state are stored."""

import dataclasses
from typing import Any

from plurax.sharding.spec import AxisSizes, TensorSharding


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """The sharding and size of a parameter, a row of a report.

    **Fields:**

    - `path`: the parameter's name.
    - `shape`, `dtype`: of the whole tensor.
    - `sharding`; `shard`: the shape of one device's shard.
    - `optimizer`: the sharding of the optimizer state of its shape, such as Adam's moments.
    - `bytes`, `optimizer_bytes`: of one such tensor on one device.
    - `note`: why the sharding is another than the rule's, or how the tensor is padded; or empty.
    - `home`: the device of the pipeline that alone has it, or None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    sharding: TensorSharding
    shard: tuple[int, ...]
    optimizer: TensorSharding
    bytes: int
    optimizer_bytes: int
    note: str = ""
    home: int | None = None

    @classmethod
    def of(
        cls,
        path: str,
        leaf: Any,
        sharding: TensorSharding,
        kept: TensorSharding,
        axes: AxisSizes,
        note: str = "",
    ) -> "ParameterInfo":
        """Return the row of a leaf, its optimizer state sharded as `kept`."""
        size = leaf.dtype.itemsize
        return cls(
            path=path,
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            sharding=sharding,
            shard=sharding.shard_shape(leaf.shape, axes),
            optimizer=kept,
            bytes=sharding.shard_bytes(leaf.shape, size, axes),
            optimizer_bytes=kept.shard_bytes(leaf.shape, size, axes),
            note=note,
        )
