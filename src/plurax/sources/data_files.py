"""Files by their name: `.npy` and `.npz` stay on the disk, memory-mapped; tables are read.

A memory-mapped array is read by the rows that a batch takes. `numpy.load` maps `.npy` alone, so the
arrays of an `.npz` are mapped here: it is a zip file of `.npy` files, and unless it is compressed
their bytes are in it as they are.

    x.npz   [zip header "w.npy"][npy header][the numbers of w] [zip header "b.npy"] ...
                                             ^ np.memmap(offset=...)
"""

import glob
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.reading import refusing

TABLES = (".parquet", ".arrow", ".feather")

ZIP_HEADER = 30
"""Bytes of the header before each file in a zip file, its name and extra field not counted."""


def adapt(what: str, data: Any) -> Any:
    """Return the arrays of what `np.load` returns of an `.npz`; other objects as they are."""
    if not isinstance(data, np.lib.npyio.NpzFile):
        return data
    name = data.zip.filename if data.zip is not None else None
    with refusing(lambda reason: errors.data_file_unreadable(what, str(name), reason)):
        return _npz(Path(name)) if name else {key: data[key] for key in data.files}


def open_path(what: str, files: Any) -> PyTree:
    """Return the data in a file, in a folder of files, or in those that match a pattern.

    Raises `BatchError` for files that are not there or cannot be read, and for other kinds.
    """
    name = os.fsdecode(files)
    with refusing(lambda reason: errors.data_file_unreadable(what, name, reason)):
        paths = _paths(name)
        suffix = paths[0].suffix if paths else Path(name).suffix
        if not paths and suffix in (".npy", ".npz", *TABLES):
            raise errors.BatchError(
                f"{what}={name!r}: there is no such file. A path is of this machine, from the "
                "current directory; other hosts' files (gs://, s3://) are read with grain or "
                "datasets."
            )
        if suffix in TABLES and all(path.suffix == suffix for path in paths):
            from plurax.sources.blocks import open_tables

            return open_tables(what, paths)
        if suffix == ".npy" and len(paths) == 1:
            return np.lib.format.open_memmap(paths[0], mode="r")
        if suffix == ".npz" and len(paths) == 1:
            return _npz(paths[0])
    raise errors.BatchError(
        f"{what}={files!r} is no file that plurax reads: .npy, .npz, .parquet, .arrow, .feather "
        "(one, a pattern such as 'part-*.parquet', or a folder of them). Load other files: "
        "pandas.read_csv(...) for a table, grain or datasets for what fits no memory."
    )


def _paths(name: str) -> list[Path]:
    """Return the files of a name, in the order of their names; none where there are none."""
    path = Path(name)
    if path.is_dir():
        return sorted(one for one in path.iterdir() if one.suffix in TABLES)
    return [path] if path.is_file() else [Path(one) for one in sorted(glob.glob(name))]


def _npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz`, memory-mapped where they are not compressed."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        arrays = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.compress_type == zipfile.ZIP_STORED:
                arrays[name] = _mapped(path, file, info.header_offset)
            else:
                with archive.open(info) as one:
                    arrays[name] = np.lib.format.read_array(one, allow_pickle=False)
    return arrays


def _mapped(path: Path, file: Any, start: int) -> np.ndarray:
    """Map the array of the `.npy` file that is at byte `start` of a zip file."""
    file.seek(start)
    header = file.read(ZIP_HEADER)
    lengths = np.frombuffer(header, "<u2", count=2, offset=26)  # of the name, of the extra field
    file.seek(start + ZIP_HEADER + int(lengths.sum()))
    version = np.lib.format.read_magic(file)
    old = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    shape, columns_first, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    options: Any = {"shape": shape, "order": "F" if columns_first else "C"}
    return np.memmap(path, dtype, "r", file.tell(), **options)
