"""Epochs of `fit` over one data source, and of a loop by hand over the same data, in one process.

The loop by hand reads as the library's own pages do, converts what it is given to NumPy arrays and
hands them to a jitted step, without waiting for it; it has no checks, no metrics and no log. What
is read in which order is as alike as the library allows: both shuffle in every epoch.
"""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px
from benchmarks import by_hand
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, SkippedError, serve

Batches = Callable[[int], Iterator[Any]]
"""The batches of an epoch."""


class Source:
    """One kind of data, of `rows` rows.

    **Fields:** `data`, for `fit`; `batches`, by hand; `batched`, whether the data have batches.
    """

    def __init__(self, data: Any, batches: Batches, against: str, *, batched: bool = False) -> None:
        self.data, self.batches, self.against, self.batched = data, batches, against, batched


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(1)
    network, batch, epochs = settings["network"], settings["batch"], settings["epochs"]
    table = make_table(settings["rows"], network["widths"][0])
    try:
        source = SOURCES[settings["source"]](table, batch)
    except ImportError as missing:
        reason = f"{missing.name} is not installed here: .venv-integrations/bin/python has it"
        raise SkippedError(reason) from missing
    task, optimizer = make_task(tuple(network["widths"])), optax.adam(1e-3)
    mesh = by_hand.make_mesh(1)
    step = by_hand.make_step(task.loss, optimizer, mesh)
    params = task.init(jax.random.key(0))

    def fit(units: int, **options: Any) -> None:
        size = None if source.batched else batch
        done = px.fit(task, optimizer, source.data, batch_size=size, epochs=epochs * units,
                      progress=False, **options)  # fmt: skip
        jax.block_until_ready(done.state)
        assert done.history[-1]["examples"] == settings["rows"], done.history[-1]

    def loop(units: int) -> None:
        state = by_hand.make_state(params, optimizer, mesh)
        for epoch in range(epochs * units):
            for batch_ in source.batches(epoch):
                state, _ = step(state, batch_)
        jax.block_until_ready(state)

    sides: dict[str, Side] = {"fit": fit, "by hand": loop}
    if not source.batched and settings["source"] not in NEVER_RESIDENT:
        sides["fit, streamed"] = lambda units: fit(units, resident=False)
    return sides, {"sides": list(sides), "by_hand": source.against}


def make_task(widths: tuple[int, ...]) -> px.Task:
    """A perceptron over columns: those of a dict by name, the last one the target."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(widths) - 1)
        pairs = zip(keys, widths[:-1], widths[1:], strict=True)
        return [jax.random.normal(k, (a, b)) * (2 / a) ** 0.5 for k, a, b in pairs]

    def loss(params: Any, batch: Any, keys: Any = None) -> jax.Array:
        *columns, y = (leaf.astype(jnp.float32) for leaf in jax.tree.leaves(batch))
        x = jnp.stack(columns, axis=1) if len(columns) > 1 else columns[0]
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return ((x @ params[-1])[:, 0] - y) ** 2

    return px.Task(init=init, loss=loss)


def make_table(rows: int, width: int) -> dict[str, np.ndarray]:
    """Random columns, and a target."""
    rng = np.random.default_rng(0)
    columns = {f"c{i:02}": rng.standard_normal(rows, np.float32) for i in range(width)}
    return {**columns, "y": rng.standard_normal(rows, np.float32)}


def as_one(table: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns as one array `x`."""
    columns = [column for name, column in table.items() if name != "y"]
    return {"x": np.ascontiguousarray(np.stack(columns, axis=1)), "y": table["y"]}


def permuted(arrays: dict[str, np.ndarray], batch: int) -> Batches:
    """By hand over arrays: a permutation, and the rows of each batch."""

    def batches(epoch: int) -> Iterator[Any]:
        order = np.random.default_rng(epoch).permutation(len(arrays["y"]))
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            yield {name: array[rows] for name, array in arrays.items()}

    return batches


BY_INDEX = "NumPy by index, and a jitted step"


def of_numpy(table: dict[str, np.ndarray], batch: int) -> Source:
    arrays = as_one(table)
    return Source(arrays, permuted(arrays, batch), BY_INDEX)


def of_lists(table: dict[str, np.ndarray], batch: int) -> Source:
    lists = {name: array.tolist() for name, array in as_one(table).items()}

    def batches(epoch: int) -> Iterator[Any]:
        if epoch == 0:  # once a run
            arrays.update({name: np.asarray(each, np.float32) for name, each in lists.items()})
        return permuted(arrays, batch)(epoch)

    arrays: dict[str, np.ndarray] = {}
    return Source(lists, batches, "np.asarray, by index, and a jitted step")


def of_pandas(table: dict[str, np.ndarray], batch: int) -> Source:
    import pandas as pd

    frame = pd.DataFrame(table)
    columns = {name: frame[name].to_numpy() for name in frame}
    return Source(frame, permuted(columns, batch), "Series.to_numpy, by index, and a jitted step")


def of_polars(table: dict[str, np.ndarray], batch: int) -> Source:
    import polars as pl

    frame = pl.DataFrame(table)
    columns = {series.name: series.to_numpy() for series in frame}
    return Source(frame, permuted(columns, batch), "Series.to_numpy, by index, and a jitted step")


def of_arrow(table: dict[str, np.ndarray], batch: int) -> Source:
    import pyarrow as pa

    whole = pa.table(table)
    columns = {name: whole[name].to_numpy() for name in whole.column_names}
    return Source(whole, permuted(columns, batch), "column.to_numpy, by index, and a jitted step")


def of_npy(table: dict[str, np.ndarray], batch: int) -> Source:
    folder = Path(tempfile.mkdtemp())
    for name, array in as_one(table).items():
        np.save(folder / f"{name}.npy", array)
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y")}
    return Source(mapped, permuted(mapped, batch), "the mapped array by index, and a jitted step")


def of_npz(table: dict[str, np.ndarray], batch: int) -> Source:
    path = Path(tempfile.mkdtemp()) / "table.npz"
    np.savez(path, **as_one(table))
    loaded = dict(np.load(path))
    return Source(path, permuted(loaded, batch), "np.load, by index, and a jitted step")


def of_blocks(read: Callable[[int], Any], count: int, batch: int) -> Batches:
    """By hand over row groups, in a new order, each shuffled."""

    def batches(epoch: int) -> Iterator[Any]:
        rng = np.random.default_rng(epoch)
        for group in rng.permutation(count):
            block = read(group)
            columns = {name: block[name].to_numpy() for name in block.column_names}
            order = rng.permutation(len(columns["y"]))
            for start in range(0, len(order), batch):
                rows = order[start : start + batch]
                yield {name: column[rows] for name, column in columns.items()}

    return batches


def of_parquet(table: dict[str, np.ndarray], batch: int) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = read_in_windows(table)
    path = Path(tempfile.mkdtemp()) / "table.parquet"
    pq.write_table(pa.table(table), path, row_group_size=rows)
    file = pq.ParquetFile(path)
    batches = of_blocks(file.read_row_group, file.num_row_groups, batch)
    return Source(path, batches, "pyarrow's row groups, and a jitted step")


def of_feather(table: dict[str, np.ndarray], batch: int) -> Source:
    import pyarrow as pa
    import pyarrow.feather as feather

    rows = read_in_windows(table)
    path = Path(tempfile.mkdtemp()) / "table.arrow"
    feather.write_feather(pa.table(table), str(path), "uncompressed", chunksize=rows)
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    batches = of_blocks(
        lambda index: pa.table(reader.get_batch(index)), reader.num_record_batches, batch
    )
    return Source(path, batches, "pyarrow's record batches, and a jitted step")


def read_in_windows(table: dict[str, np.ndarray]) -> int:
    """Read files as those that are larger than memory; return the rows of a block.

    Such a file has many windows, and this table is small: a block is a sixteenth of it, and is a
    window, as it is by hand.
    """
    rows = len(table["y"]) // 16
    blocks = importlib.import_module("plurax.sources.blocks")
    blocks.IN_MEMORY, blocks.WINDOW = 0, rows * 4 * len(table)
    return rows


def of_grain(table: dict[str, np.ndarray], batch: int) -> Source:
    import grain

    arrays = as_one(table)
    rows = [{"x": arrays["x"][i], "y": arrays["y"][i]} for i in range(len(arrays["y"]))]
    data = grain.MapDataset.source(rows).shuffle(seed=0).batch(batch)
    return Source(data, lambda epoch: iter(data), "its own loop, and a jitted step", batched=True)


def of_dataset(table: dict[str, np.ndarray], batch: int) -> Source:
    import torch
    from torch.utils.data import DataLoader, Dataset

    arrays = {name: torch.from_numpy(array) for name, array in as_one(table).items()}

    class Rows(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(arrays["y"])

        def __getitem__(self, row: int) -> Any:
            return {"x": arrays["x"][row], "y": arrays["y"][row]}

    loader = DataLoader(Rows(), batch_size=batch, shuffle=True)
    return Source(Rows(), of_loader(loader), "a DataLoader's loop, and a jitted step")


def of_torch(table: dict[str, np.ndarray], batch: int) -> Source:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(*(torch.from_numpy(array) for array in as_one(table).values()))
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    return Source(data, of_loader(loader), "a DataLoader's loop, and a jitted step")


def of_dataloader(table: dict[str, np.ndarray], batch: int) -> Source:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(*(torch.from_numpy(array) for array in as_one(table).values()))
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    return Source(loader, of_loader(loader), "its own loop, and a jitted step", batched=True)


def of_loader(loader: Any) -> Batches:
    return lambda epoch: (jax.tree.map(lambda tensor: tensor.numpy(), batch) for batch in loader)


def of_datasets(table: dict[str, np.ndarray], batch: int) -> Source:
    import datasets

    data = saved(datasets, table)
    formatted = data.with_format("numpy")
    return Source(
        data, lambda epoch: formatted.shuffle(seed=epoch).iter(batch),
        "with_format('numpy').shuffle(...).iter(...), and a jitted step",
    )  # fmt: skip


def of_iterable(table: dict[str, np.ndarray], batch: int) -> Source:
    import datasets

    stream = saved(datasets, table).to_iterable_dataset(num_shards=8)

    def batches(epoch: int) -> Iterator[Any]:
        data = stream.with_format("numpy")
        data.set_epoch(epoch)
        return data.iter(batch)

    return Source(stream, batches, "its own loop, and a jitted step")


def saved(datasets: Any, table: dict[str, np.ndarray]) -> Any:
    """A data set in Arrow files, as those from the hub are."""
    folder = Path(tempfile.mkdtemp())
    datasets.Dataset.from_dict(as_one(table)).save_to_disk(folder, num_shards=4)
    return datasets.load_from_disk(folder)


def of_tensorflow(table: dict[str, np.ndarray], batch: int) -> Source:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(as_one(table)).shuffle(10_000, seed=0)
    data = data.batch(batch).prefetch(tf.data.AUTOTUNE)
    against = "as_numpy_iterator's loop, and a jitted step"
    return Source(data, lambda epoch: data.as_numpy_iterator(), against, batched=True)


SOURCES: dict[str, Callable[[dict[str, np.ndarray], int], Source]] = {
    "NumPy arrays": of_numpy,
    "a dict of lists": of_lists,
    "a pandas DataFrame": of_pandas,
    "a polars DataFrame": of_polars,
    "an Arrow table": of_arrow,
    "mapped .npy files": of_npy,
    "an .npz file": of_npz,
    "a Parquet file in windows": of_parquet,
    "an Arrow file in windows": of_feather,
    "a Grain dataset": of_grain,
    "a PyTorch TensorDataset": of_torch,
    "a PyTorch Dataset": of_dataset,
    "a PyTorch DataLoader": of_dataloader,
    "a Hugging Face Dataset": of_datasets,
    "a Hugging Face IterableDataset": of_iterable,
    "a tf.data.Dataset": of_tensorflow,
}
NEVER_RESIDENT = (
    "a Parquet file in windows",
    "an Arrow file in windows",
    "a PyTorch Dataset",
    "a Hugging Face IterableDataset",
)


if __name__ == "__main__":
    serve(build)
