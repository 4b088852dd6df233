"""Resampling as index functions: frequencies, folds, and independence of everything else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plurax as px
from plurax.execute.array_data import ArrayData
from plurax.execute.reads import Reads
from plurax.resample import (
    Everything,
    bounded,
    draws,
    epoch_rows,
    hash_u32,
    permuted_index,
    stream_row,
)

KINDS = {
    "everything": Everything(),
    "bootstrap": px.ensemble.bootstrap(),
    "kfold": px.ensemble.kfold(3),
    "subsample": px.ensemble.subsample([5, 0.5, 11]),
}
ROWS = 22
permuted = jax.jit(permuted_index)


def test_words_are_those_of_murmur3():
    """By hand: `(s ^ w) * 0xcc9e2d51` and the finalizer of 32 bits, from 0x9e3779b9."""
    words = {(): 0x9E3779B9, (0,): 0xCAEFD312, (1, 2, 3): 0x2CE29376, (7, 12): 0xA66482F7}
    assert {given: int(hash_u32(*given)) for given in words} == words


def test_the_order_of_a_key_never_changes():
    """A run that is resumed under another release reads on where it stopped."""
    places = permuted_index(np.arange(11, dtype=np.uint32), 11, jnp.uint32(5))
    assert places.tolist() == [5, 8, 1, 10, 4, 3, 0, 7, 6, 9, 2]
    far = permuted_index(np.asarray([0, 1, 2**31 - 1], np.uint32), jnp.uint32(2**31), jnp.uint32(5))
    assert far.tolist() == [1458475543, 842722719, 280057892]


@pytest.mark.parametrize(
    ("resample", "drawn", "order"),
    [
        (Everything(), [*range(11)], [4, 9, 7, 5, 10, 3, 2, 8, 0, 6, 1]),
        (
            px.ensemble.bootstrap(),
            [9, 7, 8, 5, 4, 1, 8, 1, 8, 2, 9],
            [4, 2, 1, 1, 9, 5, 8, 8, 9, 8, 7],
        ),
        (px.ensemble.kfold(3, seed=2), [3, 5, 8, 7, 2, 1, 10], [10, 5, 7, 8, 3, 2, 1]),
        (px.ensemble.subsample([5, 7]), [3, 7, 4, 6, 10, 5, 1], [1, 7, 6, 4, 3, 10, 5]),
    ],
)
def test_the_rows_of_a_member_never_change(resample, drawn, order):
    """As above."""
    assert draws(resample, 11, 3, 1).tolist() == drawn
    assert epoch_rows(resample, 11, 3, 1, 2).tolist() == order


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (Everything, px.ensemble.bootstrap()),
        (px.ensemble.bootstrap, Everything()),
        (lambda: px.ensemble.kfold(3), px.ensemble.kfold(3, seed=1)),
        (lambda: px.ensemble.subsample([5, 7]), px.ensemble.subsample([5, 8])),
    ],
)
def test_resampling_is_compared_by_its_values(make, other):
    """What a checkpoint was trained with is compared with what `fit` is given."""
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != other


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_permute_is_a_permutation(size, key):
    index = jnp.arange(3000, dtype=jnp.uint32)
    places = permuted(jnp.minimum(index, size - 1), jnp.uint32(size), jnp.uint32(key))[:size]
    assert np.array_equal(np.sort(places), np.arange(size))


def test_every_order_of_four_comes_up_about_as_often():
    keys = np.arange(24_000, dtype=np.uint32)[None]
    places = np.asarray(permuted_index(np.arange(4, dtype=np.uint32)[:, None], 4, hash_u32(keys)))
    orders, counts = np.unique(places, axis=1, return_counts=True)
    assert orders.shape == (4, 24)
    assert counts.min() > 800
    assert counts.max() < 1200


def test_places_are_spread_evenly():
    import scipy.stats

    keys = np.arange(20_000, dtype=np.uint32)[None]
    places = np.asarray(permuted_index(np.arange(10, dtype=np.uint32)[:, None], 10, hash_u32(keys)))
    counts = np.stack([np.bincount(row, minlength=10) for row in places])
    assert scipy.stats.chisquare(counts.ravel(), ddof=18).pvalue > 1e-3


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**31))
def test_scaled_is_the_high_half_of_the_product(word, size):
    assert int(bounded(jnp.uint32(word), jnp.uint32(size))) == word * size >> 32


def test_bootstrap_frequencies_follow_the_binomial_law():
    """How often each row is drawn, over 400 members of 100 rows: binomial(100, 1/100)."""
    import scipy.stats

    count, members = 100, 400
    counts = np.stack(
        [
            np.bincount(draws(px.ensemble.bootstrap(), count, 7, m), minlength=count)
            for m in range(members)
        ]
    )
    assert (counts.sum(1) == count).all()  # exactly N draws each
    seen = np.bincount(counts.ravel(), minlength=7)
    law = scipy.stats.binom(count, 1 / count)
    expected = np.append(law.pmf(np.arange(6)), law.sf(5)) * count * members
    observed = np.append(seen[:6], seen[6:].sum())
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3
    assert scipy.stats.chisquare(counts.sum(0)).pvalue > 1e-3  # no row is favoured


@pytest.mark.parametrize("count", [10, 11, 12])
def test_folds_are_disjoint_complete_and_even(count):
    fold = px.ensemble.kfold(4)
    held = [fold.held_out(count, seed, member) for member, seed in enumerate([5, 6, 7, 8])]
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(count))
    sizes = [len(rows) for rows in held]
    assert max(sizes) - min(sizes) <= 1
    for member, rows in enumerate(held):
        trained = draws(fold, count, member + 5, member)
        assert np.array_equal(np.union1d(trained, rows), np.arange(count))
        assert not set(trained) & set(rows)
        assert len(trained) == len(set(trained)) == fold.size(count, member)


def test_samples_of_growing_size_are_nested():
    sample = px.ensemble.subsample([5, 10, 22])
    small, middle, whole = (set(draws(sample, ROWS, 0, m)) for m in (0, 1, 2))
    assert (len(small), len(middle), len(whole)) == (5, 10, 22)
    one = px.ensemble.subsample([10])
    assert set(draws(px.ensemble.subsample([5]), ROWS, 0, 1)) < set(draws(one, ROWS, 0, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("member", [0, 1, 2])
def test_every_epoch_is_a_new_order_of_the_same_draws(kind, member):
    resample = KINDS[kind]
    first, second = (epoch_rows(resample, ROWS, 3, member, epoch) for epoch in (0, 1))
    assert np.array_equal(np.sort(first), np.sort(second))
    assert np.array_equal(np.sort(first), np.sort(draws(resample, ROWS, 3, member)))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, epoch_rows(resample, ROWS, 4, member, 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_the_batch_size_changes_no_row(kind, batch_size):
    """But where one batch is a whole pass, below."""
    resample = KINDS[kind]
    data = ArrayData({"x": np.arange(ROWS)}, batch_size, seed=3, resample=resample, member=1)
    rows, counts = data.epoch_order(2)
    taken = np.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)])
    assert np.array_equal(taken, epoch_rows(resample, ROWS, 3, 1, 2))


def test_a_short_pass_goes_around_again_in_a_new_order():
    rows = epoch_rows(px.ensemble.subsample([5]), ROWS, 3, 0, 0, length=12)
    passes = rows[:5], rows[5:10]
    assert set(passes[0]) == set(passes[1])
    assert not np.array_equal(*passes)


def test_rows_are_elementwise_in_the_position():
    position = np.asarray([7, 0, 3], np.uint32)
    some = stream_row(px.ensemble.bootstrap(), ROWS, 22, 3, 1, 2, position)
    assert np.array_equal(some, epoch_rows(px.ensemble.bootstrap(), ROWS, 3, 1, 2)[position])


def test_out_of_bag_rows_are_those_not_drawn():
    held = px.ensemble.bootstrap().held_out(100, 0, 3)
    assert 20 < len(held) < 55
    assert not set(held) & set(draws(px.ensemble.bootstrap(), 100, 0, 3))
    assert Everything().held_out(100, 0, 0).size == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.ensemble.kfold(1), r"at least 2 folds are needed"),
        (lambda: px.ensemble.subsample([]), r"give sizes above 0: whole numbers of rows, or"),
        (lambda: px.ensemble.subsample([3, 0]), r"give sizes above 0: whole numbers of rows, or"),
    ],
)
def test_resampling_that_cannot_be(make, message):
    with pytest.raises(px.errors.MembersError, match=message):
        make()


def test_resampling_that_does_not_fit_the_data():
    with pytest.raises(px.errors.BatchError, match=r"have only 2 rows; use fewer folds"):
        px.ensemble.kfold(3).size(2, 0)
    with pytest.raises(px.errors.BatchError, match=r"size of 30 is not between 1 and the 22 rows"):
        px.ensemble.subsample(30).size(ROWS, 0)
    with pytest.raises(
        px.errors.BatchError, match=r"size of 0.01 is not between 1 and the 22 rows"
    ):
        px.ensemble.subsample(0.01).size(ROWS, 0)


# --- What members read on the devices ---------------------------------------------------------


READ = {
    "everything-8": (Everything(), 8, True),
    "everything-8-in order": (Everything(), 8, False),
    "bootstrap-7": (px.ensemble.bootstrap(), 7, True),
    "kfold-8": (px.ensemble.kfold(4), 8, True),
    "subsample-8": (px.ensemble.subsample([12, 0.5, 30]), 8, True),
    "everything-30": (Everything(), 30, True),
    "bootstrap-30": (px.ensemble.bootstrap(), 30, True),
    "kfold-30": (px.ensemble.kfold(4), 30, True),
    "subsample-30": (px.ensemble.subsample([12, 0.5, 30]), 30, True),
}
# Each reads in blocks of some steps. Blocks of one step and of an epoch: one of each batch size.
BLOCKS = {"a step": 1, "some steps": 20, "an epoch": 10_000}
FEW = ("bootstrap-7", "subsample-8", "kfold-30")


@pytest.mark.parametrize(
    ("name", "block"),
    [
        pytest.param(
            name,
            block,
            marks=() if block == "some steps" or name in FEW else pytest.mark.slow,
        )
        for block in BLOCKS
        for name in READ
    ],
)
def test_members_on_a_device_read_what_one_network_reads(monkeypatch, name, block):
    """Block after block, from any step on, the last smaller batch included."""
    resample, batch, shuffle = READ[name]
    monkeypatch.setattr("plurax.execute.reads.ORDERED", BLOCKS[block])
    members, data = px.Members([3, 8, 5, 9], resample=resample), {"x": np.arange(30)}
    length = members.epoch_length(30)
    steps = -(-length // batch)
    reads = Reads(ArrayData(data, batch, shuffle=shuffle).read_by(members).epoch_spec, batch, (1,))
    arrays = members.arrays(30)
    at = jax.jit(lambda member, t: reads.block_rows(member, t)[t % steps % reads.block])
    for k in range(4):
        source = ArrayData(data, batch, members.seed_of(k), shuffle, resample=resample, member=k,
                           length=length)  # fmt: skip
        for t in range(2 * steps):
            rows, counts = source.epoch_order(t // steps)
            real = counts[t % steps]
            assert int(reads.count(jnp.int32(t % steps))) == real
            read = at(arrays.take(k), jnp.int32(t))
            assert read[:real].tolist() == rows[t % steps][:real].tolist()


def test_a_batch_that_is_the_whole_data_set_is_not_reordered():
    whole = ArrayData({"x": np.arange(30)}, 30, seed=4)
    assert whole.epoch_order(3)[0][0].tolist() == list(range(30))
    sample = dataclasses.replace(whole, resample=px.ensemble.bootstrap())
    assert sample.epoch_order(3)[0].tolist() == sample.epoch_order(8)[0].tolist()
    some = ArrayData({"x": np.arange(30)}, 29, seed=4, ragged="drop")
    assert some.epoch_order(3)[0].tolist() != some.epoch_order(8)[0].tolist()
    reading = whole.epoch_spec
    assert Reads(reading, 30, (1,)).fixed
    assert not Reads(dataclasses.replace(reading, batch_size=15, steps=2), 15, (1,)).fixed
