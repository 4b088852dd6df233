"""Data of NumPy, pandas, polars, Arrow, Grain and in files; the others: tests/integrations."""

import datetime
import pathlib

import grain
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from tests.source_contract import (
    BATCH,
    ROWS,
    SGD,
    TABLE,
    TASK,
    Case,
    Contract,
    check_members,
    values,
)

import plurax as px
from plurax.sources import blocks
from plurax.sources.adapt import adapt
from plurax.sources.source import Column, Reading, Table

FRAME = pd.DataFrame(TABLE)
ARROW = pa.table(TABLE)
BATCHES = [
    {name: column[first : first + BATCH] for name, column in TABLE.items()}
    for first in range(0, ROWS, BATCH)
]


class Iterable:
    def __iter__(self):
        return iter(BATCHES)


def mapped(folder):
    for name, column in TABLE.items():
        np.save(folder / f"{name}.npy", column)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in TABLE}


def by_path(folder):
    return {name: folder / f"{name}.npy" for name in mapped(folder)}


def npz(folder, save=np.savez, open_=str):
    save(folder / "table.npz", **TABLE)
    return open_(folder / "table.npz")


def parquet(folder, group=4, files=2):
    """Row groups of 4 rows and one smaller in each file, so that batches cross them."""
    for index, rows in enumerate(np.array_split(np.arange(ROWS), files)):
        pq.write_table(ARROW.take(rows), folder / f"part-{index}.parquet", row_group_size=group)
    return str(folder / "part-*.parquet")


def arrow_file(folder, compression="uncompressed"):
    feather.write_feather(ARROW, str(folder / "table.arrow"), compression, chunksize=5)
    return folder / "table.arrow"


def records(folder):
    rows = [{name: column[row] for name, column in TABLE.items()} for row in range(ROWS)]
    return grain.MapDataset.source(rows).shuffle(seed=1).batch(BATCH)


def native(data, epoch):
    return iter(data)


CASES = {
    "NumPy": Case(lambda folder: TABLE),
    "lists": Case(lambda folder: {name: column.tolist() for name, column in TABLE.items()}),
    "pandas": Case(lambda folder: FRAME),
    "pandas, nullable": Case(lambda folder: FRAME.convert_dtypes()),
    "pandas, Arrow": Case(lambda folder: FRAME.convert_dtypes(dtype_backend="pyarrow")),
    "polars": Case(lambda folder: pl.DataFrame(TABLE)),
    "Arrow": Case(lambda folder: ARROW),
    "Arrow, in pieces": Case(lambda folder: pa.concat_tables([ARROW.slice(0, 7), ARROW.slice(7)])),
    "record batch": Case(lambda folder: ARROW.to_batches()[0]),
    ".npy": Case(mapped),
    ".npy by path": Case(by_path),
    ".npz": Case(npz),
    ".npz, compressed": Case(lambda folder: npz(folder, np.savez_compressed)),
    ".npz, opened": Case(lambda folder: npz(folder, open_=np.load)),
    "Parquet": Case(parquet),
    "Parquet, a folder": Case(lambda folder: pathlib.Path(parquet(folder)).parent),
    "Arrow file": Case(arrow_file),
    "Parquet, windows": Case(parquet, "windows"),
    "Arrow file, windows": Case(arrow_file, "windows"),
    "Feather, windows": Case(lambda folder: arrow_file(folder, "lz4"), "windows"),
    "Grain": Case(records, "theirs", native, batched=True),
    "batches": Case(lambda folder: BATCHES, "theirs", native, batched=True),
    "an iterable": Case(lambda folder: Iterable(), "theirs", native, batched=True),
}


@pytest.fixture
def case(request, monkeypatch):
    found = CASES[request.param]
    if found.order == "windows":
        monkeypatch.setattr(blocks, "IN_MEMORY", 0)
        monkeypatch.setattr(blocks, "WINDOW", 200)  # two blocks or three
    return found


every = pytest.mark.parametrize("case", CASES, indirect=True)


@every
class TestEverySource(Contract):
    pass


ARRAYS = ["lists", "pandas", "polars", "Arrow", ".npy", ".npz", "Parquet"]


@pytest.mark.parametrize("name", ARRAYS)
def test_members_draw_their_own_rows_of_what_becomes_arrays(name, tmp_path):
    check_members(CASES[name], tmp_path)


@pytest.mark.parametrize("case", ["Parquet, windows"], indirect=True)
def test_members_do_not_draw_from_windows(case, tmp_path):
    members = px.Members(2, resample=px.ensemble.bootstrap())
    with pytest.raises(px.errors.MembersError, match="bootstrap"):
        px.fit(TASK, SGD, case.make(tmp_path), members=members, batch_size=BATCH)


def test_a_mapped_array_stays_on_the_disk(tmp_path):
    """What the file holds after it was opened is what a batch has: nothing was read before."""
    np.save(tmp_path / "y.npy", np.zeros(ROWS, np.float32))
    np.savez(tmp_path / "y.npz", first=np.zeros(3), y=np.zeros(ROWS, np.float32))
    for name in ("y.npy", "y.npz"):
        found = adapt("data", tmp_path / name)
        column = found if name == "y.npy" else found["y"]
        assert isinstance(column, np.memmap)
        later = np.memmap(tmp_path / name, np.uint8, "r+")
        written = np.arange(ROWS, dtype=np.float32)
        later[column.offset :][: column.nbytes] = written.view(np.uint8)
        np.testing.assert_array_equal(column, written)


@pytest.mark.ci
def test_a_column_in_a_file_is_read_by_row_and_once_a_batch():
    asked = []

    def read(rows, names):
        asked.append((rows, list(names)))
        return {name: TABLE[name][rows] for name in names}

    columns = Table(read).columns(read(slice(0, 1), list(TABLE)), ROWS)
    asked.clear()
    assert all(isinstance(column, Column) for column in columns.values())
    source = px.train.ArrayData(columns, BATCH, seed=3)
    like = px.train.ArrayData(TABLE, BATCH, seed=3)
    found = [values(batch) for batch, _ in source.batches(px.train.Position())]
    assert found == [values(batch) for batch, _ in like.batches(px.train.Position())]
    assert [len(rows) for rows, _ in asked] == [4, 4, 4, 4, 4, 3]
    asked.clear()
    options = {"batch_size": BATCH, "progress": False, "evaluation": columns, "seed": 3}
    streamed = px.fit(TASK, SGD, columns, resident=False, **options)
    resident = px.fit(TASK, SGD, columns, resident=True, **options)
    np.testing.assert_array_equal(streamed.state.params, resident.state.params)
    assert streamed.history[0]["eval_loss"] == resident.history[0]["eval_loss"]
    servers = px.Servers(workers=1, mode="sync")
    px.fit(TASK, SGD, columns, servers=servers, **options)


@pytest.mark.parametrize("case", ["Parquet, windows", "Arrow file, windows"], indirect=True)
def test_windows_before_the_position_are_not_read(case, tmp_path, monkeypatch):
    data = case.make(tmp_path)
    source = adapt("data", data)
    read = []
    whole = blocks.Blocks._read
    monkeypatch.setattr(
        blocks.Blocks, "_read", lambda self, chosen: (read.append(chosen), whole(self, chosen))[1]
    )
    how = Reading(BATCH, seed=3, shuffle=True)
    every = [values(batch) for batch in source.batches(how, 1, 0)]
    order = list(read)
    assert sorted(block for window in order for block in window) == list(range(len(source._rows)))
    assert len(order) > 1
    read.clear()
    assert [values(batch) for batch in source.batches(how, 1, 5)] == every[5:]
    assert read == order[-1:]
    assert list(source.batches(how, 1, 6)) == []
    dropped = list(source.batches(Reading(BATCH, 3, True, drop=True), 1, 0))
    assert [values(batch) for batch in dropped] == every[:5]


@pytest.mark.parametrize("case", ["Parquet, windows", "Arrow file, windows"], indirect=True)
def test_a_file_cut_while_it_is_read_is_named(case, tmp_path):
    """A memory map of it would end the process."""
    data = case.make(tmp_path)
    batches = adapt("data", data).batches(Reading(BATCH, seed=3, shuffle=True), 1, 0)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(px.errors.BatchError, match=r"was opened, and cannot be read any more: .* "
                       "Leave a file as it is until training ends"):  # fmt: skip
        list(batches)


def test_rows_are_mixed_within_a_window_and_over_the_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "IN_MEMORY", 0)
    monkeypatch.setattr(blocks, "WINDOW", 10_000)
    pq.write_table(pa.table({"y": np.arange(10_000)}), tmp_path / "y.parquet", row_group_size=250)
    source = adapt("data", tmp_path / "y.parquet")
    how = Reading(500, shuffle=True)
    first, *_ = [batch["y"] for batch in source.batches(how, 0, 0)]
    groups, counts = np.unique(first // 250, return_counts=True)
    assert 3 <= len(groups) <= 8
    assert counts.max() < 250


def test_the_bytes_of_a_file_are_those_of_its_arrays(tmp_path):
    """A column of one value takes next to nothing in the file."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(3_000)), 3)
    same = pa.table({"y": np.zeros(1_000, np.float32), "x": vectors, "l": [[1]] * 1_000})
    pq.write_table(same, tmp_path / "same.parquet")
    assert blocks.ParquetTable(tmp_path / "same.parquet").byte_count == 1_000 * (4 + 3 * 8)


def test_what_an_array_of_arrow_holds_is_not_copied():
    found = adapt("data", ARROW)
    for name, column in TABLE.items():
        assert np.shares_memory(found[name], np.asarray(ARROW[name].chunk(0)))
        assert np.shares_memory(adapt("data", FRAME)[name], FRAME[name].to_numpy())
        np.testing.assert_array_equal(found[name], column)


def test_lists_of_one_length_in_a_column_are_a_dim():
    x = np.arange(24.0).reshape(4, 3, 2)
    nested = pa.table({"x": pa.array(x.tolist())})
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 6)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(x)
    np.testing.assert_array_equal(adapt("data", nested.slice(1, 2))["x"], x[1:3])
    found = adapt("data", pa.table({"x": fixed}).slice(1))["x"]
    np.testing.assert_array_equal(found, x.reshape(4, 6)[1:])
    np.testing.assert_array_equal(adapt("data", pa.table({"x": tensors}))["x"], x)
    frame = pl.DataFrame({"x": x}, schema={"x": pl.Array(pl.Float64, (3, 2))})
    np.testing.assert_array_equal(adapt("data", frame)["x"], x)
    np.testing.assert_array_equal(adapt("data", {"x": list(x), "n": {"k": range(4)}})["x"], x)
    assert adapt("data", {"x": x, "n": {"k": range(4)}})["n"]["k"].tolist() == [0, 1, 2, 3]


def test_data_that_are_arrays_stay_the_same_object():
    assert adapt("data", TABLE) is TABLE
    assert adapt("data", BATCHES) is BATCHES


DAYS = [datetime.date(2026, 1, day) for day in (1, 2)]
WRONG = {"c": ["x", "y"]}, {"c": [1.0, None]}, {"c": DAYS}
TEXTS = "['c'] has dtype {}, which no device can hold; number the classes first: {}. Or leave the"
NULLS = "['c'] has no value in 1 rows (null, or NaN in pandas), and a loss would not be finite;"
REFUSED = [
    (pd.DataFrame({"c": [1.0, np.nan]}), NULLS + " write {0}.fillna({{'c': 0}}), or {0}.dropna()"),
    (pd.DataFrame({"c": pd.array([1, None], "Int64")}), NULLS),
    (pd.DataFrame(WRONG[0]), TEXTS.format("str", "{0}['c'].astype('category').cat.codes")),
    (pd.DataFrame({"c": pd.Series(["x", "y"], dtype="category")}), "['c'] has dtype category"),
    (pd.DataFrame({"c": pd.to_datetime(DAYS)}), "the seconds since the first"),
    (pd.DataFrame({"c": [[1], [2, 3]]}), "make numbers of them first, in a column for each"),
    (pd.DataFrame([[1, 2]], columns=["c", "c"]), "{0} has two columns 'c'; rename one of them"),
    (pl.DataFrame(WRONG[0]), "{0}['c'].cast(polars.Categorical).to_physical()"),
    (pl.DataFrame(WRONG[1]), NULLS + " write {0}.fill_null(0), or {0}.drop_nulls('c')."),
    (pl.DataFrame(WRONG[2]), "has dtype Date, which no device can hold; make numbers of them"),
    (pl.DataFrame({"c": [[1], [2]]}), "all rows need equally many values: pad them"),
    (pl.DataFrame({"c": [{"d": 1}]}), "Or leave the column out: {0}.drop('c')."),
    (pl.LazyFrame(WRONG[0]), "{0} is a LazyFrame, which has no rows yet; write {0}.collect(), or"),
    (pa.table(WRONG[0]), "{0}['c'].combine_chunks().dictionary_encode().indices"),
    (pa.table({"c": pa.array(["x"]).dictionary_encode()}), "number the classes first"),
    (pa.table(WRONG[1]), NULLS + " write pyarrow.compute.fill_null({0}['c'], 0), or"),
    (pa.table(WRONG[2]), "Or leave the column out: {0}.drop_columns('c')."),
    (pa.table({"c": [[1], [2, 3]]}), "all rows need equally many values: pad them"),
    (pa.table({"c": [{"d": 1}]}), "make numbers of them first, in a column for each"),
    (pa.table([[1], [2]], names=["c", "c"]), "{0} has two columns 'c'; rename one of them"),
    ({"c": 3}, "{0}['c'] is a int, and a dict of data holds arrays with the examples in the"),
    ({"c": [[1], [2, 3]]}, "{0}['c'] is a list of lists of different lengths, and an array has"),
    ({"c": [[1, "x"]]}, "{0}['c'] is a list that holds 'x', and a device holds numbers. Number"),
    ({"c": {"d": [1, None]}}, "{0}['c']['d'] is a list that holds None, and a device holds"),
    ("table.csv", "{0}='table.csv' is no file that plurax reads: .npy, .npz, .parquet, .arrow"),
    ("none.parquet", "{0}='none.parquet': there is no such file. A path is of this machine"),
    ({"c": "none.npy"}, "{0}['c']='none.npy': there is no such file."),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_number_is_refused_by_the_name_of_its_column(data, message):
    good = {"c": np.ones(2, np.float32)}
    task = px.Task(
        init=lambda key: jnp.zeros(()),
        loss=lambda params, batch, keys: batch["c"] * params,
        predict=lambda params, batch: batch["c"],
    )
    for name, options in {"data": {"data": data},
                          "evaluation": {"data": good, "evaluation": data}}.items():  # fmt: skip
        with pytest.raises(px.errors.BatchError) as raised:
            px.fit(task, optax.sgd(0.0), batch_size=2, progress=False, **options)
        assert message.format(name) in str(raised.value)
    program = px.compile(task, optax.sgd(0.0), px.Plan(), good)
    with pytest.raises(px.errors.BatchError) as raised:
        program.predict(program.init(), data)
    assert message.format("inputs") in str(raised.value)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    def refused(data):
        with pytest.raises(px.errors.BatchError) as raised:
            adapt("data", data)
        return str(raised.value)

    for name in ("x.npy", "x.npz", "x.parquet", "x.arrow"):
        (tmp_path / name).write_bytes(b"no numbers at all")
        assert f"{name}' cannot be read: " in refused(str(tmp_path / name))
        assert "Write the file anew, with numpy.save" in refused(tmp_path / name)
    np.save(tmp_path / "o.npy", np.array([None]))
    np.savez(tmp_path / "o.npz", x=np.array([None]))
    assert "cannot be read" in refused(tmp_path / "o.npy")
    assert "it holds Python objects" in refused(tmp_path / "o.npz")
    pq.write_table(ARROW, tmp_path / "x.parquet")
    pq.write_table(ARROW.select(["a"]), tmp_path / "y.parquet")
    said = refused(f"{tmp_path}/*.parquet")
    assert f"the columns of {tmp_path}/y.parquet are not those of {tmp_path}/x.parquet" in said
    assert "is no file that plurax reads" in refused(f"{tmp_path}/*")
    pq.write_table(pa.table(WRONG[0]), tmp_path / "t.parquet")
    assert "polars.scan_parquet(...).drop('c').sink_parquet(...), of any size" in refused(
        tmp_path / "t.parquet"
    )
    pq.write_table(ARROW.slice(0, 0), tmp_path / "e.parquet")
    assert "no examples" in refused(tmp_path / "e.parquet")


def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch):
    pq.write_table(ARROW, tmp_path / "x.parquet")
    monkeypatch.setitem(__import__("sys").modules, "grain", None)
    with pytest.raises(px.errors.MissingPackageError, match=r"plurax\[parquet\]"):
        adapt("data", tmp_path / "x.parquet")


def test_rows_of_own_are_for_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "IN_MEMORY", 0)
    data = parquet(tmp_path)
    with pytest.raises(px.errors.BatchError, match="local_batches=True is for an iterable"):
        px.fit(TASK, SGD, data, batch_size=BATCH, local_batches=True)
    with pytest.raises(px.errors.BatchError, match="needs batch_size"):
        px.fit(TASK, SGD, data)


def test_ragged_is_obeyed_by_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "IN_MEMORY", 0)
    data, options = parquet(tmp_path), {"batch_size": BATCH, "progress": False}
    dropped = px.fit(TASK, SGD, data, ragged="drop", **options)
    assert dropped.history[0]["examples"] == 20
    assert int(dropped.state.step) == 5
    with pytest.raises(px.errors.BatchError, match="a batch has 3 examples where 4 were asked for"):
        px.fit(TASK, SGD, data, ragged="error", **options)
    all_in_one = px.fit(TASK, SGD, data, batch_size=100, progress=False)
    assert all_in_one.program.batch_size == ROWS
