"""Batches read ahead on another thread, into buffers that one call trains on."""

import threading

import jax
import numpy as np
import optax
import pytest

import plurax as px
from plurax.execute.array_data import Position
from plurax.execute.batch_buffer import ALIGNMENT, BYTES, MOST_SLOTS, BatchBuffer
from plurax.loop.data import StreamData
from plurax.loop.iterate import train_iter
from plurax.loop.read_ahead import OneSlot, ReadAhead

SIZE = 4
TASK = px.Task(
    init=lambda key: jax.numpy.zeros(3),
    loss=lambda params, batch, keys: (batch["x"] @ params - batch["y"]) ** 2,
)


def batches(count, size=SIZE):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(size, 3)), "y": rng.normal(size=size)} for _ in range(count)]


def compiled(plan=px.Plan(), size=SIZE):  # noqa: B008  frozen
    return px.compile(TASK, optax.sgd(0.1), plan, batches(1, size)[0])


def positions(each):
    return ((batch, Position(0, at)) for at, batch in enumerate(each, 1))


def reading(source, stopping=lambda: False):
    return ReadAhead(source, compiled().buffers.new, stopping)


class Slow:
    """A source that gives batches until it is told to wait, and then waits for `go`."""

    def __init__(self, each, wait_after):
        self.go = threading.Event()
        self.each, self.wait_after = each, wait_after

    def __iter__(self):
        for at, pair in enumerate(positions(self.each)):
            if at == self.wait_after:
                assert self.go.wait(60)
            yield pair


def test_fast_batches_come_in_full_buffers_and_in_order():
    each = batches(MOST_SLOTS * 2 + 3)
    with reading(positions(each)) as ahead:
        sizes, xs, places = [], [], []
        while filled := ahead.take(MOST_SLOTS):
            count = len(filled.positions)
            sizes.append(count)
            xs.append(filled.buffer.rows["x"][: count * SIZE].copy())
            places += [position.batch for position in filled.positions]
        assert ahead.has_more() is False
    assert sizes == [MOST_SLOTS, MOST_SLOTS, 3]
    wanted = np.concatenate([one["x"] for one in each]).astype(np.float32)
    np.testing.assert_array_equal(np.concatenate(xs), wanted)
    assert places == list(range(1, len(each) + 1))


def test_of_a_slow_source_what_is_there_is_taken():
    source = Slow(batches(5), wait_after=2)
    with reading(iter(source)) as ahead:
        assert len(ahead.take(4).positions) == 2
        source.go.set()
        assert ahead.has_more() is True
        assert [len(ahead.take(4).positions), ahead.take(4)] == [3, None]


def test_while_training_is_to_stop_nothing_is_waited_for():
    stopping = threading.Event()
    source = Slow(batches(3), wait_after=1)
    with reading(iter(source), stopping.is_set) as ahead:
        assert len(ahead.take(1).positions) == 1
        stopping.set()
        assert ahead.take(1) is None
        assert ahead.has_more() is None
        source.go.set()


def test_errors_of_a_source_come_after_the_batches_before():
    def broken():
        yield from positions(batches(2))
        raise OSError("the disk is gone")

    with reading(broken()) as ahead:
        assert len(ahead.take(9).positions) == 2
        for ask in (ahead.has_more, lambda: ahead.take(1)):
            with pytest.raises(OSError, match="the disk is gone"):
                ask()


def test_large_batches_are_read_two_ahead_one_to_a_buffer():
    """One waits in the buffer and one with the reader; an error comes after both."""
    read = []

    def broken():
        for at in range(4):
            read.append(at)
            yield at, Position(0, at + 1)
        raise OSError("the disk is gone")

    class Watched(OneSlot):
        """A slot that knows when the reader, with the next batch in hand, finds it full."""

        def __init__(self):
            super().__init__()
            self.reader_waits = threading.Event()

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name == "is_full" and value and len(read) > self.batch + 1:
                self.reader_waits.set()
            return value

    slots, taken = [], []

    def new_slot():
        slots.append(Watched())
        return slots[-1]

    def take_all(ahead):
        for part in ahead.parts():
            taken.append((part.buffer.batch, part.positions, part.is_last))
            if len(taken) < 3:
                assert slots[len(taken)].reader_waits.wait(60)
            assert read == list(range(min(4, len(taken) + 2)))

    reader = ReadAhead(broken(), new_slot, lambda: False)
    with reader as ahead, pytest.raises(OSError, match="the disk is gone"):
        take_all(ahead)
    assert taken == [(at, [Position(0, at + 1)], False) for at in range(3)]


def test_batches_that_do_not_fit_are_refused():
    with reading(positions([*batches(1), {"x": np.ones((SIZE, 2)), "y": np.ones(SIZE)}])) as ahead:
        assert len(ahead.take(9).positions) == 1
        with pytest.raises(px.errors.BatchError, match="x"):
            ahead.take(1)


def test_the_thread_ends_where_nothing_more_is_taken():
    with reading(positions(batches(MOST_SLOTS * 3))) as ahead:
        thread = ahead._thread
        assert ahead.take(1)
    thread.join(60)
    assert not thread.is_alive()


def test_a_buffer_pads_its_last_batch_and_is_aligned():
    buffer = compiled().buffers.new()
    for batch in (*batches(1), *batches(1, size=3)):
        buffer.write(batch)
    rows, counts = buffer.order()
    assert counts[:3].tolist() == [SIZE, 3, SIZE]
    assert rows[1].tolist() == [4, 5, 6, 7]
    assert all(leaf.ctypes.data % ALIGNMENT == 0 for leaf in jax.tree.leaves(buffer.rows))
    assert len(buffer) == 2
    assert not buffer.is_full


def test_large_batches_members_and_coupled_losses_have_no_buffers():
    assert compiled().buffers.slots == MOST_SLOTS
    rows = BYTES // (4 * 4) // 5
    assert compiled(size=rows).buffers.slots == 5
    assert compiled(size=2 * rows).buffers is None
    members = px.compile(TASK, optax.sgd(0.1), px.Plan(), batches(1)[0], members=px.Members(2))
    assert members.buffers is None


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=4), px.Plan(data=2, zero=3)], ids=str)
@pytest.mark.parametrize("every", [None, 1, 3], ids=str)
@pytest.mark.usefixtures("x64")
def test_buffered_steps_are_those_of_a_loop_by_hand(plan, every):
    """However many of them a call takes; and each call ends where it has to."""
    each = [*batches(9), *batches(1, size=3)]
    program = compiled(plan)
    outputs = train_iter(
        program, program.init(0), StreamData(each, SIZE), epochs=2, checkpoint_every=every
    )
    params, steps, losses = np.zeros(3), [], []
    for output in outputs:
        steps.append(output.step)
        begin, end = output.columns
        losses += np.asarray(output.metrics["loss"])[begin:end].tolist()
        positions = [position.batch for position in output.positions]
        assert positions == list(range(positions[-1] - (end - begin) + 1, positions[-1] + 1))
        last = output
    wanted = []
    for batch in each * 2:
        wrong = batch["x"] @ params - batch["y"]
        wanted.append(np.mean(wrong**2))
        params = params - 0.1 * 2 * batch["x"].T @ wrong / len(wrong)
    np.testing.assert_allclose(losses, wanted, rtol=1e-10)
    np.testing.assert_allclose(program.to_canonical(last.state).params, params, rtol=1e-10)
    assert (last.position, last.epoch_done, last.step) == (Position(2), True, 20)
    assert set(range(0, 21, every or 10)) - {0} <= set(steps)
    assert 10 in steps


def test_arrays_of_jax_stay_on_their_devices(monkeypatch):
    """They are not copied to the host and back: a call takes one batch."""

    def written(*_):
        raise AssertionError("a batch was copied to the host")

    monkeypatch.setattr(BatchBuffer, "write", written)
    each = [jax.tree.map(jax.numpy.asarray, batch) for batch in batches(5)]
    result = px.fit(TASK, optax.sgd(0.1), each, epochs=1, progress=False)
    with pytest.raises(AssertionError, match="copied to the host"):
        px.fit(TASK, optax.sgd(0.1), batches(5), epochs=1, progress=False)
    monkeypatch.undo()
    by_hand = px.fit(TASK, optax.sgd(0.1), batches(5), epochs=1, progress=False)
    np.testing.assert_allclose(result.state.params, by_hand.state.params, rtol=1e-10)


def test_training_that_is_to_stop_does_not_begin_another_epoch():
    stopping = threading.Event()

    class Blocked:
        begun = 0

        def __iter__(self):
            self.begun += 1
            yield from batches(2)
            stopping.set()
            threading.Event().wait()  # for ever; the thread is a daemon

    data, program = Blocked(), compiled()
    outputs = train_iter(
        program, program.init(0), StreamData(data, SIZE), epochs=9, stopping=stopping.is_set
    )
    *_, last = outputs
    assert (last.step, last.position, last.epoch_done) == (2, Position(0, 2), False)
    assert data.begun == 1


class Held(list):
    """Batches that come once `go` is set."""

    def __init__(self, each):
        super().__init__(each)
        self.go = threading.Event()

    def __iter__(self):
        assert self.go.wait(60)
        return super().__iter__()


class Gang:
    """Two processes, from the first one: the other one has its batch, and is not to stop."""

    index, count, is_primary = 0, 2, True

    def __init__(self):
        self.said = []

    def all_gather(self, value):
        self.said.append(value)
        return [value, True]


@pytest.mark.parametrize("stopped", [True, False])
def test_of_several_processes_none_begins_an_epoch_without_the_others(stopped):
    """A signal while the step is compiled: this one's first batch is not there, the other's is."""
    source, group = Held(batches(2)), Gang()
    program = compiled()
    program.buffers = None  # as of several processes
    if not stopped:
        source.go.set()
    steps = train_iter(
        program, program.init(0), StreamData(source, SIZE), group=group, stopping=lambda: stopped
    )
    if stopped:
        assert next(steps, None) is None
        assert group.said == [None]
        source.go.set()
    else:
        assert next(steps).step == 1
        assert group.said == [True, True]
