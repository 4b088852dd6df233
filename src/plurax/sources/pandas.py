"""pandas: a DataFrame is a dict of its columns, a Series an array."""

from typing import TYPE_CHECKING, Any

import numpy as np

from plurax import errors

if TYPE_CHECKING:
    import pandas as pd

COLUMN_ADVICE = errors.ColumnAdvice(
    numbered="{frame}[{name!r}].astype('category').cat.codes",
    left_out="{frame}.drop(columns={name!r})",
    filled="{frame}.fillna({{{name!r}: 0}}), or {frame}.dropna()",
)


def adapt(what: str, data: Any) -> Any:
    """Return the columns of a DataFrame by name, without its index; other objects as they are.

    Raises `BatchError` for a column with other values than numbers, or without some.
    """
    import pandas as pd

    if not isinstance(data, pd.DataFrame):
        return data
    if not data.columns.is_unique:
        twice = data.columns[data.columns.duplicated()][0]
        raise errors.column_twice(what, str(twice))
    return {str(name): _array(what, str(name), data[name]) for name in data.columns}


def _array(what: str, name: str, series: "pd.Series[Any]") -> np.ndarray:
    import pandas as pd

    if pd.api.types.is_bool_dtype(series.dtype) or pd.api.types.is_numeric_dtype(series.dtype):
        if missing := int(series.isna().sum()):
            raise errors.column_has_nulls(what, name, missing, COLUMN_ADVICE)
        # A nullable dtype, Int64 or int64[pyarrow], holds numbers of one of NumPy's.
        return series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", series.dtype))
    kind = _kind(series)
    raise errors.column_not_numbers(what, name, str(series.dtype), kind, COLUMN_ADVICE)


def _kind(series: "pd.Series[Any]") -> str:
    import pandas as pd

    texts = isinstance(series.dtype, pd.CategoricalDtype | pd.StringDtype)
    if texts or pd.api.types.infer_dtype(series) == "string":
        return "texts"
    return "times" if series.dtype.kind in "mM" else "objects"
