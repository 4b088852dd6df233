"""Arrow: a table is a dict of its columns, without a copy where a column is one piece in memory."""

from typing import Any

import numpy as np

from plurax import errors

COLUMN_ADVICE = errors.ColumnAdvice(
    numbered="{frame}[{name!r}].combine_chunks().dictionary_encode().indices",
    left_out="{frame}.drop_columns({name!r})",
    filled="pyarrow.compute.fill_null({frame}[{name!r}], 0), or {frame}.drop_null()",
)


def adapt(what: str, data: Any) -> Any:
    """Return the columns of a Table or RecordBatch by name; other objects as they are.

    Raises `BatchError` for a column with other values than numbers, or without some.
    """
    import pyarrow as pa

    if not isinstance(data, pa.Table | pa.RecordBatch):
        return data
    return arrays(what, data)


def arrays(
    what: str, table: Any, advice: errors.ColumnAdvice = COLUMN_ADVICE
) -> dict[str, np.ndarray]:
    """Return the columns of a table by name. `advice` is for the user's library."""
    import pyarrow as pa

    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if name in columns:
            raise errors.column_twice(what, name)
        columns[name] = _array(what, name, column, advice)
    return columns


def _array(what: str, name: str, column: Any, advice: errors.ColumnAdvice) -> np.ndarray:
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        raise errors.column_has_nulls(what, name, column.null_count, advice)
    if isinstance(kind, pa.BaseExtensionType):
        shape = getattr(kind, "shape", None)
        inner = _array(what, name, column.storage, advice)
        return inner if shape is None else inner.reshape(len(column), *shape)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.asarray(column.value_lengths()) if len(column) else np.zeros(1, int)
        if lengths.min() != lengths.max():
            raise errors.column_not_numbers(what, name, str(kind), "lists", advice)
        # Not `column.values`: those are of the whole list, where `column` is a part of it.
        inner = _array(what, name, column.flatten(), advice)
        return inner.reshape(len(column), int(lengths[0]), *inner.shape[1:])
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.to_numpy(zero_copy_only=False)
    raise errors.column_not_numbers(what, name, str(kind), _kind(kind), advice)


def _kind(kind: Any) -> str:
    import pyarrow as pa

    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary,
             pa.types.is_string_view)  # fmt: skip
    if any(one(kind) for one in texts):
        return "texts"
    return "times" if pa.types.is_temporal(kind) else "objects"
