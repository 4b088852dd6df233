"""Data of PyTorch, Hugging Face and TensorFlow, each by its own objects."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import datasets
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from torch.utils.data import DataLoader, TensorDataset

import plurax as px
from plurax.loop.data import as_data
from plurax.sources.adapt import adapt, as_arrays
from tests.source_contract import (
    BATCH,
    ROWS,
    TABLE,
    TASK,
    Case,
    Contract,
    check_members,
    values,
)

TENSORS = {name: torch.from_numpy(column.copy()) for name, column in TABLE.items()}


class Rows(torch.utils.data.Dataset):
    """A user's own map-style data set of tuples."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return tuple(tensor[row] for tensor in TENSORS.values())


class Records(Rows):
    """One of dicts, with Python's numbers and NumPy's."""

    def __getitem__(self, row):
        return {"a": TABLE["a"][row], "b": int(TABLE["b"][row]), "y": TENSORS["y"][row]}


class Drawn(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Rows())


def loader(**options):
    return DataLoader(Rows(), batch_size=BATCH, **options)


def seeded():
    return loader(shuffle=True, generator=torch.Generator().manual_seed(7))


def of_torch(data, epoch):
    return iter(data)


def of_seeded(data, epoch):
    data.generator.manual_seed(7 + epoch)
    return iter(data)


def dataset():
    return datasets.Dataset.from_dict(TABLE)


def on_disk(folder):
    if not (folder / "saved").exists():
        dataset().save_to_disk(folder / "saved", num_shards=3)
    return datasets.load_from_disk(folder / "saved")


def as_stream(data=None):
    return (data or dataset()).to_iterable_dataset(num_shards=3).shuffle(seed=5, buffer_size=6)


def of_stream(data, epoch):
    data = data.with_format("numpy")
    data.set_epoch(epoch)  # last: with_format forgets it
    return data.iter(BATCH)


def transformed():
    data = dataset()
    data.set_transform(lambda batch: {name: torch.tensor(each) for name, each in batch.items()})
    return data


def of_tf(shuffle=False):
    data = tf.data.Dataset.from_tensor_slices(dict(TABLE))
    return (data.shuffle(9, seed=3) if shuffle else data).batch(BATCH).prefetch(1)


def passes_of_tf(data, epoch):
    for _ in range(epoch):
        iter(data)
    return data.as_numpy_iterator()


CASES = {
    "tensors": Case(lambda folder: TENSORS),
    "TensorDataset": Case(lambda folder: TensorDataset(*TENSORS.values())),
    "torch Dataset": Case(lambda folder: Rows()),
    "torch Dataset of dicts": Case(lambda folder: Records()),
    "torch Subset": Case(
        lambda folder: torch.utils.data.Subset(TensorDataset(*TENSORS.values()), range(ROWS))
    ),
    "DataLoader": Case(lambda folder: loader(), "theirs", of_torch, batched=True),
    "DataLoader, shuffle": Case(lambda folder: loader(shuffle=True), "theirs", batched=True),
    "DataLoader, generator": Case(lambda folder: seeded(), "theirs", of_seeded, batched=True),
    "DataLoader, sampler": Case(
        lambda folder: loader(sampler=torch.utils.data.SubsetRandomSampler(range(ROWS))),
        "theirs", batched=True,
    ),
    "DataLoader, stream": Case(
        lambda folder: DataLoader(Drawn(), batch_size=BATCH), "theirs", of_torch, batched=True
    ),
    "datasets": Case(lambda folder: dataset()),
    "datasets, torch": Case(lambda folder: dataset().with_format("torch")),
    "datasets, selected": Case(
        lambda folder: datasets.concatenate_datasets([dataset(), dataset()]).select(
            range(ROWS, 2 * ROWS)
        )
    ),
    "datasets, on disk": Case(on_disk),
    "datasets, transformed": Case(lambda folder: transformed()),
    "IterableDataset": Case(lambda folder: as_stream(), "theirs", of_stream),
    "tf.data": Case(lambda folder: of_tf(), "theirs", passes_of_tf, batched=True),
    "tf.data, shuffle": Case(lambda folder: of_tf(True), "theirs", passes_of_tf, batched=True),
}  # fmt: skip
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def seed():
    """As in a new process: what shuffles without a generator draws from these."""
    torch.manual_seed(0)
    tf.random.set_seed(0)


@every
class TestEverySource(Contract):
    pass


SHUFFLED = ["DataLoader, shuffle", "DataLoader, generator", "DataLoader, sampler",
            "IterableDataset", "tf.data, shuffle"]  # fmt: skip


@pytest.mark.parametrize("name", SHUFFLED)
def test_what_shuffles_has_another_order_in_each_pass(name, tmp_path):
    data = CASES[name].read(tmp_path)
    at = [px.train.Position(epoch) for epoch in range(3)]
    passes = [[values(batch) for batch, _ in data.batches(one)] for one in at]
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_the_order_of_a_loader_comes_from_the_seed_of_the_run():
    def first(seed):
        data, _ = as_data(
            loader(shuffle=True), batch_size=None, seed=seed, shuffle=True, ragged="pad"
        )
        return values(next(iter(data.batches(px.train.Position())))[0])

    assert first(1) == first(1) != first(2)


def test_the_users_loader_stays_as_it_is():
    data = loader(shuffle=True, num_workers=0)
    sampler, batch_sampler = data.sampler, data.batch_sampler
    found, _ = as_data(data, batch_size=None, seed=0, shuffle=True, ragged="pad")
    assert len(list(found.batches(px.train.Position()))) == 6
    assert data.sampler is sampler is batch_sampler.sampler
    assert data.batch_sampler is batch_sampler
    assert data.generator is None is sampler.generator


def test_a_loader_may_have_processes():
    data = loader(num_workers=2, shuffle=True, multiprocessing_context="spawn")
    options = {"progress": False, "epochs": 2, "seed": 3}
    found = px.fit(TASK, optax.sgd(0.01), data, **options)
    alone = px.fit(TASK, optax.sgd(0.01), loader(shuffle=True), **options)
    np.testing.assert_array_equal(found.state.params, alone.state.params)


@pytest.mark.parametrize("name", ["tensors", "TensorDataset", "datasets", "datasets, on disk"])
def test_members_draw_their_own_rows_of_what_becomes_arrays(name, tmp_path):
    check_members(CASES[name], tmp_path)


def test_examples_are_computed_anew_in_each_epoch():
    read = []

    class Counted(Rows):
        def __getitem__(self, row):
            read.append(row)
            return super().__getitem__(row)

    px.fit(TASK, optax.sgd(0.01), Counted(), batch_size=BATCH, epochs=3, progress=False)
    assert sorted(read) == sorted([0, *range(ROWS), *range(ROWS), *range(ROWS)])


def test_a_column_on_the_disk_is_not_read_as_a_whole(tmp_path, monkeypatch):
    data = on_disk(tmp_path)
    found = adapt("data", data)
    asked = []
    whole = datasets.Dataset.__getitem__
    monkeypatch.setattr(
        datasets.Dataset, "__getitem__", lambda self, key: (asked.append(key), whole(self, key))[1]
    )
    px.fit(TASK, optax.sgd(0.01), found, batch_size=BATCH, resident=False, progress=False)
    assert [len(rows) for rows in asked] == [4, 4, 4, 4, 4, 3]


def test_tensors_share_their_memory_with_arrays():
    tensor = torch.arange(6.0).reshape(3, 2).requires_grad_()
    assert np.shares_memory(adapt("data", tensor), tensor.detach().numpy())
    found = as_arrays({"x": tensor, "h": tensor.to(torch.bfloat16)})
    assert found["x"].tolist() == found["h"].astype(np.float32).tolist() == tensor.tolist()
    assert found["h"].dtype == ml_dtypes.bfloat16
    data, _ = as_data(TensorDataset(tensor), batch_size=2, seed=0, shuffle=True, ragged="pad")
    assert np.shares_memory(data.arrays[0], tensor.detach().numpy())
    assert as_arrays({"x": tf.constant([1.0, 2.0])})["x"].tolist() == [1.0, 2.0]


def test_images_are_decoded():
    pixels = np.arange(3 * 5 * 4, dtype=np.uint8).reshape(3, 5, 4)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(3)})
    data = datasets.Dataset.from_dict({"image": list(pixels), "label": [0, 1, 2]}, features)
    source = adapt("data", data)
    batch = source._read(np.array([2, 0]))
    assert batch["image"].shape == (2, 5, 4)
    np.testing.assert_array_equal(batch["image"], pixels[[2, 0]])
    assert batch["label"].tolist() == [2, 0]


def test_dims_of_a_column_are_dims_of_the_array():
    x = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    features = datasets.Features(
        {"x": datasets.Array2D((2, 3), "float32"), "e": datasets.List(datasets.Value("float32"))}
    )
    data = datasets.Dataset.from_dict({"x": x, "e": x[:, 0]}, features)
    found = adapt("data", data)
    assert found["x"].shape == (4, 2, 3)
    np.testing.assert_array_equal(found["x"][np.array([3, 1])], x[[3, 1]])
    np.testing.assert_array_equal(np.asarray(found["e"]), x[:, 0])
    chosen = adapt("data", data.with_format("numpy", columns=["x"]))
    assert list(chosen) == ["x"]


class Uneven(Rows):
    def __getitem__(self, row):
        return np.zeros(row + 1)


class Named(Rows):
    def __getitem__(self, row):
        return {"y": TENSORS["y"][row], "name": "x"}


class Unknown(torch.utils.data.Dataset):
    def __getitem__(self, row):
        raise IndexError


def refused_of_tf():
    whole = tf.data.Dataset.from_tensor_slices(TABLE)
    return whole, of_tf().repeat()


NAMES = datasets.Dataset.from_dict({"c": ["x", "y"], "d": [1.0, None]})
REFUSED = [
    (NAMES, "data['c'] has dtype string, which no device can hold; number the classes first: "
     "data.class_encode_column('c'). Or leave the column out: data.remove_columns('c')."),
    (NAMES.remove_columns("c").select([1]), "data['d'] has no value in 1 rows"),
    (datasets.DatasetDict(train=NAMES, test=NAMES), "data holds several data sets (train, test); "
     "choose one of them, such as data['train']."),
    (NAMES.select([]), "no examples"),
    (Drawn(), "data is a Drawn, which gives examples one by one; write torch.utils.data."),
    (Unknown(), "data is a Unknown, which gives examples one by one; write"),
    (Named(), "one holds str values. An example is an array, or a tuple or dict of arrays"),
    (torch.utils.data.Subset(Rows(), []), "no examples"),
    (refused_of_tf()[0], "of single examples, and training takes batches; write data.batch(batch"),
    (refused_of_tf()[1], "data repeats without end, and an epoch is one pass; leave .repeat()"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=range(len(REFUSED)))
def test_data_that_are_no_batches_of_numbers_are_refused_by_name(data, message):
    with pytest.raises(px.errors.BatchError) as raised:
        px.fit(TASK, optax.sgd(0.0), data, batch_size=BATCH, progress=False)
    assert message in str(raised.value)


def test_examples_of_several_shapes_are_refused():
    source = adapt("data", Uneven())
    with pytest.raises(
        px.errors.BatchError, match="data: its examples cannot be put together in a"
    ):
        source._read(np.arange(3))


def test_a_stream_needs_a_batch_size():
    with pytest.raises(px.errors.BatchError, match="needs batch_size"):
        px.fit(TASK, optax.sgd(0.0), as_stream(), progress=False)


def test_a_module_named_datasets_of_the_users_own_is_not_the_librarys(monkeypatch):
    import types

    monkeypatch.setitem(__import__("sys").modules, "datasets", types.ModuleType("datasets"))
    mine = type("Mine", (dict,), {"__module__": "datasets"})(TABLE)
    assert adapt("data", mine) is mine


def test_one_device_or_two_give_the_same(tmp_path):
    """With examples that are read by row, as with arrays."""
    found = [
        px.fit(TASK, optax.sgd(0.01), Rows(), batch_size=BATCH, plan=px.Plan(data=parts),
               progress=False).state.params
        for parts in (1, 2)
    ]  # fmt: skip
    np.testing.assert_allclose(*jax.tree.map(jnp.asarray, found), rtol=1e-5)
