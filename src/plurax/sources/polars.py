"""polars: a DataFrame is a dict of its columns, a Series an array."""

from typing import TYPE_CHECKING, Any

import numpy as np

from plurax import errors

if TYPE_CHECKING:
    import polars as pl

COLUMN_ADVICE = errors.ColumnAdvice(
    numbered="{frame}[{name!r}].cast(polars.Categorical).to_physical()",
    left_out="{frame}.drop({name!r})",
    filled="{frame}.fill_null(0), or {frame}.drop_nulls({name!r})",
)


def adapt(what: str, data: Any) -> Any:
    """Return the columns of a DataFrame by name; other objects as they are.

    Raises `BatchError` for a column with other values than numbers, or without some, and for a
    LazyFrame.
    """
    import polars as pl

    if isinstance(data, pl.LazyFrame):
        raise errors.BatchError(
            f"{what} is a LazyFrame, which has no rows yet; write {what}.collect(), or for more "
            f"than fits memory {what}.sink_parquet('data.parquet') and data='data.parquet'."
        )
    if isinstance(data, pl.DataFrame):
        return {series.name: _array(what, series) for series in data.get_columns()}
    return data


def _array(what: str, series: "pl.Series") -> np.ndarray:
    import polars as pl

    inner: Any = series.dtype
    while isinstance(inner, pl.Array):  # equally many values in each row
        inner = inner.inner
    if inner != pl.Boolean and not (inner.is_integer() or inner.is_float()):
        kinds = {"texts": (pl.String, pl.Categorical, pl.Enum), "lists": (pl.List,)}
        found = [kind for kind, known in kinds.items() if isinstance(inner, known)]
        kind = "times" if inner.is_temporal() else (found or ["objects"])[0]
        raise errors.column_not_numbers(what, series.name, str(series.dtype), kind, COLUMN_ADVICE)
    if missing := series.null_count():
        raise errors.column_has_nulls(what, series.name, missing, COLUMN_ADVICE)
    return series.to_numpy()
