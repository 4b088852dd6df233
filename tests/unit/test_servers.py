"""Parameter servers: what a user says of them, what servers refuse, and how stale a push may be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests import models
from tests.draws import draws

import plurax as px
from plurax.server.account import Account
from plurax.server.messages import Snapshot, Ticket
from plurax.server.run_spec import RunSpec
from plurax.server.servers import Servers
from plurax.server.shard import make_shard
from plurax.server.shard_layout import ShardLayout, assign_shards, from_bytes, to_bytes, to_host
from plurax.server.worker import Worker

REFUSED = {
    "shards is a whole number of at least 1": {"shards": 0},
    "workers is a whole number of at least 1": {"workers": 2.0},
    "snapshot_every is a whole number of at least 1": {"snapshot_every": True},
    "mode is one of sync, bounded, async": {"mode": "ssp"},
    "compression is one of bfloat16, int8, topk": {"compression": "zip"},
    "correction is one of scale, delay": {"mode": "async", "correction": "none"},
    "transport is one of ray, threads": {"transport": "grpc"},
    "say how many steps a worker may be ahead": {"mode": "bounded"},
    "staleness is a whole number of at least 0": {"mode": "bounded", "staleness": -1},
    "staleness has no meaning in mode='sync'": {"staleness": 3},
    "quorum has no meaning in mode='async'": {"mode": "async", "quorum": 1},
    "correction has no meaning in mode='sync'": {"correction": "scale"},
    "a quorum is at most 2": {"quorum": 3},
    "a lease is a positive number of seconds": {"lease": 0},
    "only transport='ray' has an address": {"transport": "threads", "address": "ray://x"},
}


@pytest.mark.parametrize("text", REFUSED)
def test_fields_that_contradict_each_other_are_refused(text):
    with pytest.raises(px.errors.PlanError, match=text.replace("(", r"\(")):
        Servers(**REFUSED[text])


def fitted(servers, task=None, optimizer=None, **options):
    task = task or models.mlp_task()
    optimizer = optimizer or optax.sgd(0.1)
    return px.fit(
        task, optimizer, models.data(24), batch_size=8, progress=False, servers=servers, **options
    )


@pytest.mark.ci
def test_what_servers_cannot_train_is_refused_before_anything_runs():
    two = Servers(workers=2, transport="threads")
    with pytest.raises(px.errors.PlanError, match="parameter servers train one network"):
        fitted(two, members=px.Members(3))
    with pytest.raises(px.errors.PlanError, match=r"servers is a plurax\.Servers"):
        fitted({"workers": 2})
    coupled = px.Task(init=models.init, loss=lambda params, batch, keys, mask: keys, coupled=True)
    with pytest.raises(px.errors.PlanError, match="loss couples the examples of a batch"):
        fitted(two, coupled)
    with pytest.raises(px.errors.PlanError, match="a worker's plan has pipeline > 1 and zero=1"):
        fitted(two, models.perceptron_stack(), plan=px.Plan(pipeline=2, microbatches=2, zero=1))
    flat = optax.flatten(optax.sgd(0.1))
    with pytest.raises(px.errors.PlanError, match="reads tensors of several of them at once"):
        fitted(dataclasses.replace(two, shards=2), optimizer=flat)
    # The norm of an update, after Adam, is not a number of the gradient alone.
    after = optax.chain(optax.adam(0.1), optax.clip_by_global_norm(1.0))
    stale = Servers(workers=2, shards=2, mode="async", transport="threads")
    with pytest.raises(
        px.errors.PlanError, match="sends such numbers along, and cannot know this one"
    ):
        fitted(stale, optimizer=after)
    fitted(dataclasses.replace(stale, shards=1), optimizer=after)


# --- What is where --------------------------------------------------------------------------------


def test_the_largest_are_assigned_first():
    assert assign_shards([400, 300, 200, 200], 2) == [0, 1, 1, 0]
    assert assign_shards([1, 1], 3) == [0, 1]


def test_vectors_hold_each_parameter_once():
    leaves = [jnp.arange(6.0).reshape(2, 3), jnp.ones(5, jnp.bfloat16), jnp.float32(7.0),
              jnp.zeros((0, 4)), jnp.ones((150, 150))]  # fmt: skip
    layout = ShardLayout(leaves, 2)
    found = {}
    for shard in range(2):
        held = {i: leaf for i, leaf in enumerate(leaves) if layout.homes[i] in (None, shard)}
        vectors = layout.join(shard, held)
        lengths = layout.lengths(shard)
        assert [(str(v.dtype), v.size) for v in vectors] == lengths
        sent = [
            from_bytes(to_bytes(vector), dtype)
            for vector, (dtype, _) in zip(vectors, lengths, strict=True)
        ]
        found |= layout.split(shard, sent)
    for index, leaf in enumerate(leaves):
        assert found[index].dtype == leaf.dtype
        assert np.array_equal(found[index], leaf)


# --- What a server refuses ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["async", "sync"])
def pushed(request):
    """A server and a worker's push to it, before it was pushed."""
    servers = Servers(shards=1, workers=1, mode=request.param, transport="threads")
    data = models.data(8)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data)
    spec = RunSpec(models.mlp_task(), optax.adam(0.1), servers, px.Plan(), like, data)
    program = px.compile(spec.task, spec.optimizer, px.Plan(), like)
    leaves = dict(enumerate(map(to_host, jax.tree.leaves(program.init()))))
    worker = Worker(spec, 0, 0, to_host(program.init().key))

    def fresh():
        return make_shard(spec, 0, 0, Snapshot(0, leaves, {}))

    header, content = worker.gradients(Ticket(0, 0, 1, 0, np.arange(8)), 0, fresh().pull(0, 0)[1])
    return fresh, header, content


def nan(content):
    damaged = np.frombuffer(bytearray(content[0][0].tobytes()), np.uint8).view(np.float32)
    damaged[3] = np.nan
    return ((damaged.view(np.uint8),),)


DAMAGES = {
    "server restarted": (lambda h: dataclasses.replace(h, bases=((1, 0),)), None),
    "wrong layout": (lambda h: dataclasses.replace(h, layout="another"), None),
    "damaged": (lambda h: dataclasses.replace(h, bases=((0, 5),)), None),
    "damaged scalars": (lambda h: dataclasses.replace(h, scalars={}), None),
    "damaged dtype": (
        lambda h: dataclasses.replace(
            h, scalars={i: np.asarray(x, np.float16) for i, x in h.scalars.items()}
        ),
        None,
    ),
    "not finite": (lambda h: h, nan),
    "wrong layout shorter": (lambda h: h, lambda c: ((c[0][0][:-4],),)),
    "wrong layout dtype": (lambda h: h, lambda c: ((c[0][0].view(np.float32),),)),
    "wrong layout more": (lambda h: h, lambda c: (*c, *c)),
    "wrong layout kind": (lambda h: h, lambda c: [1, "two"]),
}


def bits(shard):
    return {index: to_host(leaf).tobytes() for index, leaf in shard.leaves.items()}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_push_changes_nothing(name, pushed):
    fresh, header, content = pushed
    shard = fresh()
    before = bits(shard)
    damage, harm = DAMAGES[name]
    reply = shard.push(damage(header), content if harm is None else harm(content))
    assert reply.reason is not None
    assert name.startswith(reply.reason)
    assert bits(shard) == before
    assert shard.version == 0
    # The server lives, and takes the push that is well.
    assert shard.push(header, content).reason is None


def harmed(content, draw):
    """A content that is none of this shard, or not finite where its header says it is."""
    kinds = ("cut", "longer", "dtype", "more", "less", "no tuple", "no array", "nan", "inf")
    kind = draw(st.sampled_from(kinds))
    part = content[0][0]
    if kind in ("nan", "inf"):
        values = np.array(part).view(np.float32)
        values[draw(st.integers(0, len(values) - 1))] = float(kind)
        return ((values.view(np.uint8),), *content[1:])
    return {
        "cut": ((part[: draw(st.integers(0, len(part) - 1))],), *content[1:]),
        "longer": ((np.append(part, part[: draw(st.integers(1, 9))]),), *content[1:]),
        "dtype": ((part.view(draw(st.sampled_from([np.int8, np.uint16, np.float32]))),),),
        "more": (*content, *content),
        "less": (),
        "no tuple": [*content],
        "no array": (("text",),),
    }[kind]


def lying(header, draw):
    """A header that contradicts itself, or what the shard knows."""
    some = draw(st.sampled_from(sorted(header.scalars)))
    changes = {
        "incarnation": {"bases": ((draw(st.integers(1, 9)), 0),)},
        "version": {"bases": ((0, draw(st.integers(1, 99))),)},
        "shards": {"bases": ((0, 0),) * draw(st.sampled_from([0, 2, 3]))},
        "layout": {"layout": draw(st.text(max_size=5))},
        "scalar": {"scalars": {i: x for i, x in header.scalars.items() if i != some}},
        "shape": {"scalars": {**header.scalars, some: np.zeros((2, 2), np.float32)}},
        "sequence": {"sequence": draw(st.integers(-9, -1))},
        "life": {"life": -1},
    }
    return dataclasses.replace(header, **changes[draw(st.sampled_from(sorted(changes)))])


@draws(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pushes_drawn_at_random_change_nothing_and_kill_nobody(data, pushed):
    fresh, header, content = pushed
    shard = fresh()
    before = bits(shard)
    for _ in range(data.draw(st.integers(1, 4))):
        bad = lying(header, data.draw) if data.draw(st.booleans()) else header
        harm = bad is header or data.draw(st.booleans())
        reply = shard.push(bad, harmed(content, data.draw) if harm else content)
        assert reply.reason is not None
        assert bits(shard) == before
        assert shard.version == 0
    assert shard.push(header, content).reason is None
    assert bits(shard) != before or shard.spec.servers.mode == "sync"


def test_a_push_is_taken_once(pushed):
    fresh, header, content = pushed
    shard = fresh()
    assert shard.push(header, content).reason is None
    after = bits(shard)
    again = shard.push(header, content)
    assert again.reason == "duplicate"
    later = dataclasses.replace(header, life=1, sequence=0)
    taken = shard.push(later, content)
    if shard.spec.servers.mode == "sync":
        assert taken.reason == "duplicate"  # another life's gradient of the same part
        assert bits(shard) == after
    else:
        assert taken.reason is None
        early = dataclasses.replace(header, life=0, sequence=9)
        assert shard.push(early, content).reason == "worker restarted"


def test_a_gradient_that_is_too_stale_is_refused():
    servers = Servers(workers=4, mode="async", max_staleness=0, transport="threads")
    account = fitted(servers, epochs=2).staleness
    assert account.updates + account.rejected["too stale"] == 6
    assert set(account.staleness) <= {0}


# --- What comes of a run --------------------------------------------------------------------------


def test_the_account_says_what_servers_and_workers_did():
    servers = Servers(workers=2, shards=2, mode="bounded", staleness=1, transport="threads")
    result = fitted(servers, epochs=2)
    account = result.staleness
    assert isinstance(account, Account)
    assert account.updates == sum(account.staleness.values()) == 6
    sent = 4 * (5 * 16 + 16 + 16 * 3)
    assert account.pushed_bytes == account.pulled_bytes == 6 * sent
    assert sum(account.worker_steps.values()) == 6
    assert len(account.push_seconds) == 6
    text = str(account)
    for part in ("6 updates, staleness", "rejected: none; lost: 0", "pushed 0.0 MB", "p95"):
        assert part in text
    row = result.history[-1]
    assert row["servers"]["updates"] == 6
    assert 0 <= row["staleness"] <= 2 * 1 + 2


@pytest.mark.parametrize("compression", ["bfloat16", "int8", "topk"])
def test_compressed_gradients_train_too(compression):
    servers = Servers(workers=2, mode="sync", compression=compression, transport="threads")
    plain = fitted(dataclasses.replace(servers, compression=None), epochs=6)
    found = fitted(servers, epochs=6)
    assert found.staleness.pushed_bytes < 0.6 * plain.staleness.pushed_bytes
    first, last = (found.history[epoch]["loss"] for epoch in (0, -1))
    assert last < first


PREPARED = {
    "sync": ({"workers": 2}, px.Plan()),
    "async": ({"mode": "async", "shards": 2}, px.Plan()),
    "int8": ({"mode": "async", "compression": "int8"}, px.Plan()),
    "topk": ({"compression": "topk"}, px.Plan()),
    "data": ({"mode": "async"}, px.Plan(data=2)),
    "zero": ({"workers": 2}, px.Plan(data=2, zero=3)),
    "pipeline": ({"mode": "async"}, px.Plan(pipeline=2, microbatches=2)),
}


def gradient(spec, prepare):
    """A worker's first gradient, and how many programs are compiled for it."""
    leaves = jax.tree.leaves(px.compile(spec.task, spec.optimizer, px.Plan(), spec.batch).init())
    saved = Snapshot(0, dict(enumerate(map(to_host, leaves))), {})
    servers = spec.servers
    pulled = [make_shard(spec, i, 0, saved).pull(0, 0)[1] for i in range(servers.shards)]
    worker = Worker(spec, 0, 0, np.zeros(2, np.uint32))
    # Left from pushes before it, where the compression leaves any.
    worker._residuals = jax.tree.map(jnp.ones_like, worker._residuals)
    if prepare:
        worker.prepare()
    ticket, found = Ticket(3, 0, servers.parts, 0, np.arange(7)), []
    compiled = models.compilations(lambda: found.append(worker.gradients(ticket, 0, *pulled)))
    return compiled, *found[0]


@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_worker_compiles_no_more(name):
    """And has nothing left to send of what it was prepared with: its gradient is the same."""
    fields, plan = PREPARED[name]
    servers = Servers(transport="threads", **{"shards": 1, "workers": 1, **fields})
    data, optimizer = models.data(8), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data)
    make = models.mlp_task if plan.pipeline == 1 else models.perceptron_stack
    (none, header, *content), (some, other, *same) = (
        gradient(RunSpec(make(), optimizer, servers, plan, like, data), prepare)
        for prepare in (True, False)
    )
    assert none == 0 < some
    assert (header.numbers, header.finite) == (other.numbers, True)
    assert jax.tree.all(jax.tree.map(np.array_equal, content, same))


@pytest.mark.parametrize("correction", ["scale", "delay"])
def test_corrections_leave_fresh_gradients_alone(correction):
    servers = Servers(workers=1, mode="async", transport="threads")
    plain = fitted(servers).state.params
    found = fitted(dataclasses.replace(servers, correction=correction)).state.params
    assert models.max_rel_error(found, plain) < 1e-6


def test_a_task_of_the_user_that_fails_says_so():
    def loss(params, batch, keys):
        raise RuntimeError("the user's own")

    task = px.Task(init=models.init, loss=loss)
    with pytest.raises(RuntimeError, match="the user's own"):
        fitted(Servers(transport="threads"), task)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_knows_whether_its_gradient_is_finite(mode, value):
    """From numbers that it computes anyway, where they are of all gradients."""

    def loss(params, example, key):
        return params["scale"] * jnp.sum(example["x"] @ params["a"]) + jnp.sum(params["b"])

    first = {"a": jnp.ones((models.FEATURES, 3)), "b": jnp.ones(40), "scale": jnp.ones(())}
    scaled = px.Task(init=lambda key: first, loss=px.per_example(loss))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), models.data(8))
    servers = Servers(workers=1, shards=2, mode=mode, transport="threads")
    spec = RunSpec(scaled, optax.sgd(0.1), servers, px.Plan(), like)
    worker = Worker(spec, 0, 0, to_host(jax.random.key(0)))
    scalars = {i: jnp.ones(spec.leaves[i].shape, spec.leaves[i].dtype)
               for i in spec.update.scalars}  # fmt: skip
    grads = dict(enumerate(jax.tree.leaves(first)))
    for index in (None, *grads):
        changed = dict(grads)
        if index is not None:
            changed[index] = jnp.ravel(grads[index]).at[-1].set(value).reshape(grads[index].shape)
        numbers = {} if mode == "sync" else worker._numbers(changed, scalars)
        assert bool(numbers) == (mode == "async")
        assert worker._are_finite(changed, numbers) == (index is None)
