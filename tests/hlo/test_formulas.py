"""What networks split over devices communicate and hold: the formulas, from compiled programs."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from tests import models

import plurax as px
from plurax import tree
from plurax.hlo.compiled_collectives import collectives
from plurax.partition.buckets import MOST, packed

WIDTH, LAYERS, N = 32, 4, 8
ROWS = 16


def chain_task():
    """An unrolled chain of equal square layers, all weights of one shape."""

    def loss(params, batch, keys):
        x = batch["x"]
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.sum((x - batch["x"]) ** 2, axis=1)

    def init(key):
        return list(jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5)

    return px.Task(init=init, loss=loss)


def compiled(plan, task=None, batch=None, optimizer=None):
    rows = {"x": np.ones((ROWS, WIDTH), np.float32)} if batch is None else batch
    return px.compile(task or chain_task(), optimizer or optax.adam(1e-2), plan, rows)


@functools.cache
def chain(plan):
    return compiled(plan)


def total(program, kind, *axes):
    """Bytes of a kind of collective over some axes, loops counted by their turns."""
    return sum(
        c.bytes * c.trips
        for c in program.collectives()
        if (c.equivalent_kind or c.kind) == kind and c.axes == axes and c.bytes > 64
    )


def sent(program):
    """Bytes that each device sends for whole tensors."""
    return sum(c.bytes_sent * c.trips for c in program.collectives() if c.bytes > 64)


P = LAYERS * WIDTH * WIDTH * 4


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_data_parallelism_and_zero_send_their_formulas(zero, microbatches):
    program = chain(px.Plan(data=N, zero=zero, microbatches=microbatches))
    if zero == 0:
        # Loss and weight ride along.
        assert total(program, "all-reduce", "data") == pytest.approx(P, abs=16)
        assert sent(program) == pytest.approx(2 * (N - 1) / N * P, abs=32)
        return
    reductions = microbatches if zero == 2 else 1
    assert total(program, "reduce-scatter", "data") == reductions * P / N
    assert total(program, "all-gather", "data") == P
    assert sent(program) == pytest.approx((1 + reductions) * (N - 1) / N * P)
    assert not any(c.equivalent_kind for c in program.collectives()), "real reduce-scatters"
    in_loop = {c.kind for c in program.collectives() if c.in_loop}
    assert in_loop == ({"reduce-scatter"} if zero == 2 and microbatches > 1 else set())


@pytest.mark.parametrize(
    ("layers", "microbatches"),
    [
        *((layers, 2) for layers in (1, 2, 100)),
        (1, 1),
        *(pytest.param(layers, 1, marks=pytest.mark.slow) for layers in (2, 100)),
    ],
)
def test_zero_3_sends_three_halves_of_an_all_reduce(layers, microbatches):
    """Gathered forward and backward, but the first layer: no gradient goes further back.

    In buckets of some layers, which change how many collectives there are, and not what they send.
    """
    bucket = layers * P // LAYERS
    program = compiled(px.Plan(data=N, zero=3, microbatches=microbatches, bucket_bytes=bucket))
    gathers = 2 * LAYERS - 1
    assert total(program, "all-gather", "data") == microbatches * gathers * P / LAYERS
    assert total(program, "reduce-scatter", "data") == microbatches * P / N
    counts = Counter(c.kind for c in program.collectives() if c.bytes > 64)
    assert counts["all-gather"] == -(-LAYERS // layers) + -(-(LAYERS - 1) // layers)
    assert counts["reduce-scatter"] == -(-LAYERS // layers)


DEEP = 12


def deep_task():
    """Many parameters of two shapes, each layer in a call of its own."""

    @jax.jit
    def layer(x, params):
        return jnp.tanh(x @ params["w"] + params["b"][None])

    def loss(params, batch, keys):
        x = batch["x"]
        for one in params:
            x = layer(x, one)
        return jnp.sum((x - batch["x"]) ** 2, axis=1)

    def init(key):
        weights = jax.random.normal(key, (DEEP, WIDTH, WIDTH)) / WIDTH**0.5
        return [{"w": w, "b": jnp.full(WIDTH, 0.1)} for w in weights]

    return px.Task(init=init, loss=loss)


def kinds(program):
    """How many collectives of each kind, and their bytes; and the same as planned."""
    found = [(c.kind, c.bytes) for c in program.collectives() if c.axes == ("data",)]
    planned = [(r.kind, r.bytes) for r in program.planned_collectives() if r.axes == ("data",)]
    pairs = []
    for some in (found, planned):
        some = [(kind, size) for kind, size in some if kind != "all-reduce"]
        sizes = Counter()
        for kind, size in some:
            sizes[kind] += size
        pairs.append((Counter(kind for kind, _ in some), sizes))
    return pairs


@pytest.mark.parametrize("coupled", [False, True])
def test_what_is_repeated_for_each_example_is_gathered_before(coupled):
    def init(key):
        return {"first": jnp.ones((1, 1, WIDTH)), "out": jnp.ones((WIDTH, WIDTH))}

    def loss(params, batch, keys, mask=None):
        x = batch["x"][:, None]
        x = jnp.concatenate([jnp.broadcast_to(params["first"], x.shape), x], 1)
        losses = jnp.sum(jnp.tanh(x @ params["out"]) ** 2, (1, 2))
        return losses if mask is None else losses / mask.sum().astype(losses.dtype)

    program = compiled(px.Plan(data=4, zero=3), px.Task(init=init, loss=loss, coupled=coupled))
    sizes = [one.bytes for one in program.planned_collectives() if one.kind == "all-gather"]
    # Both forward, in a bucket, and the matrix backward.
    assert sizes == [4 * WIDTH + 4 * WIDTH**2, 4 * WIDTH**2]


def network(params, x):
    for one in params:
        x = jnp.tanh(x @ one["w"] + one["b"])
    return x.sum()


def sloped(params, batch, keys):
    """A loss with derivatives by the inputs: its forward pass has transposed equations."""
    slopes = jax.vmap(jax.grad(network, 1), (None, 0))(params, batch["x"])
    return (slopes**2).sum(1) + jax.vmap(network, (None, 0))(params, slopes)


def criticized(params, batch, keys):
    """A loss with parameters without derivatives beside those with, as an actor's critic has."""
    values = jax.vmap(network, (None, 0))(params, batch["x"])
    return values + jax.vmap(network, (None, 0))(jax.lax.stop_gradient(params), -batch["x"]) ** 2


@pytest.mark.parametrize(
    ("loss", "remat"),
    [(sloped, "none"), (criticized, "none"), (None, "full"), (sloped, "full"), (criticized, 0.5)],
)
def test_zero_3_gathers_twice_what_a_pass_uses_again(loss, remat):
    """In the forward and in the backward pass, derivatives and what is recomputed included."""
    deep = deep_task()
    task = px.Task(init=lambda key: deep.init(key)[:3], loss=loss) if loss else deep
    batch = {"x": np.ones((4, WIDTH), np.float32)}
    program = compiled(px.Plan(data=4, zero=3, remat=remat), task, batch)
    params = sum(4 * leaf.size for leaf in jax.tree.leaves(program.canonical_shapes.params))
    gathered = [c for c in program.planned_collectives() if c.kind == "all-gather"]
    assert sum(c.bytes * c.trips for c in gathered) <= 2 * params


@pytest.mark.parametrize("remat", ["full", 0.5])
def test_zero_3_gathers_a_layer_that_is_computed_again_once(remat):
    """Of a network that is written out, however small buckets are; but not a whole network."""
    batch = {"x": np.ones((4, WIDTH), np.float32)}
    task = deep_task()
    loss = jax.checkpoint(lambda params, batch: task.loss(params, batch, None))
    whole = px.Task(init=task.init, loss=lambda params, batch, keys: loss(params, batch))
    sent = []
    for each in (task, whole):
        program = compiled(px.Plan(data=4, zero=3, remat=remat, bucket_bytes=1), each, batch)
        gathered = [c for c in program.planned_collectives() if c.kind == "all-gather"]
        sent.append(sum(c.bytes * c.trips for c in gathered))
    params = DEEP * 4 * WIDTH * (WIDTH + 1)
    assert sent[0] <= 2 * params < sent[1]


@pytest.mark.ci
def test_buckets_send_what_single_tensors_do():
    """Of 24 parameters, in three to eight collectives instead of 35 and 24; as it was planned."""
    layer = 4 * WIDTH * (WIDTH + 1)
    sizes = {}
    for layers in (0, 3, 100):
        plan = px.Plan(data=N, zero=3, bucket_bytes=layers * layer or 1)
        found, planned = kinds(compiled(plan, deep_task()))
        assert found == planned
        counts, sizes[layers] = found
        if layers:
            forward = -(-2 * DEEP // min(2 * layers, MOST))
            backward = -(-(DEEP - 1) // min(layers, MOST))  # matrices alone, and not the first
            assert counts == {"all-gather": forward + backward, "reduce-scatter": forward}
        else:
            assert counts == {"all-gather": 3 * DEEP - 1, "reduce-scatter": 2 * DEEP}
    assert sizes[3] == sizes[100] == sizes[0]


@pytest.mark.parametrize(
    ("likes", "limit", "names", "sizes"),
    [
        ("abcdefghijk", 99, None, [8, 3]),  # at most eight tensors
        ("abcabcabcabc", 99, None, [6, 6]),  # a whole number of repetitions
        ("xabcabcabcab", 99, None, [8, 4]),  # nothing begins with x again
        ("abababab", 3, None, [2, 2, 2, 2]),  # three fit, two repeat
        ("abcd", 2, None, [2, 2]),
        ("abcd", 0, None, [1, 1, 1, 1]),  # larger than a bucket: alone
        ("aaaa", 99, "wxyx", [3, 1]),  # a parameter comes again
        ("ababbb", 4, "wxyzyw", [4, 2]),  # where it is full as well
        ("", 99, None, []),
    ],
)
def test_buckets_end_with_a_repetition(likes, limit, names, sizes):
    found = packed(likes, [1] * len(likes), limit, names)
    assert [len(bucket) for bucket in found] == sizes
    assert [place for bucket in found for place in bucket] == list(range(len(likes)))


def test_zero_1_reduces_and_gathers_in_buckets():
    found, planned = kinds(compiled(px.Plan(data=N, zero=1), deep_task()))
    assert found == planned
    buckets = -(-2 * DEEP // MOST)
    assert found[0] == {"all-gather": buckets, "reduce-scatter": buckets}
    assert (
        found[1]["all-gather"] == N * found[1]["reduce-scatter"] == 4 * DEEP * WIDTH * (WIDTH + 1)
    )


def test_zero_holds_a_share_of_the_state():
    """Adam: P + 2P/n, and 3P/n."""
    batch = ROWS // N * WIDTH * 4
    for zero, expected in {0: 3 * P, 1: P + 2 * P / N, 2: P + 2 * P / N, 3: 3 * P / N}.items():
        arguments = chain(px.Plan(data=N, zero=zero)).memory().arguments - batch
        assert arguments == pytest.approx(expected, rel=0.02)


@pytest.mark.ci
def test_zero_3_never_holds_all_parameters():
    """Of 16 layers a few are whole at a time, in an unrolled network too."""
    global_task = chain_task()
    deep = px.Task(
        init=lambda key: list(jax.random.normal(key, (16, 64, 64)) / 8),
        loss=lambda params, batch, keys: global_task.loss(params, batch, keys),
    )
    batch = {"x": np.ones((N, 64), np.float32)}
    parameters = 16 * 64 * 64 * 4
    for layers, share in ((1, 0.4), (2, 0.6)):
        plan = px.Plan(data=N, zero=3, bucket_bytes=layers * parameters // 16)
        program = compiled(plan, deep, batch, optax.sgd(1e-2))
        assert program.memory().temporaries < share * parameters
    whole = compiled(px.Plan(data=N), deep, batch, optax.sgd(1e-2))
    assert whole.memory().temporaries > parameters


@pytest.mark.ci
def test_zero_3_gathers_a_stack_layer_by_layer():
    program = compiled(px.Plan(data=6, zero=3), models.transformer_task(), models.text(12))
    blocks = tree.named_leaves(program.canonical_shapes.params["blocks"])
    gathered = [c for c in program.collectives() if c.kind == "all-gather" and c.in_loop]
    assert {c.trips for c in gathered} == {models.DEPTH}
    stack = sum(int(np.prod(leaf.shape)) * 4 for leaf in blocks.values())
    forward_and_backward = sum(c.bytes * c.trips for c in gathered)
    assert stack < forward_and_backward <= 2 * stack
    scattered = [c for c in program.collectives() if c.kind == "reduce-scatter" and c.in_loop]
    assert sum(c.bytes * c.trips for c in scattered) == stack / 6


# --- Tensor parallelism ---------------------------------------------------------------------------

TENSOR = 6
RESIDUAL = 4 * models.TOKENS * models.WIDTH * 4  # the residual stream of 4 examples


@functools.cache
def transformer(sequence=False, **axes):
    plan = px.Plan(shardings=models.megatron(sequence), **axes)
    size = 4 * axes.get("data", 1)
    return compiled(plan, models.transformer_task(), models.text(size))


@pytest.mark.parametrize("remat", ["none", "full", 0.3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_zero_3_gathers_a_layer_once_in_each_direction(remat, microbatches):
    """Also where the backward pass computes activations again: it needs a weight for both.

    A layer has one weight that is used in three parts, and one that is cast.
    """
    depth = 4

    def init(key):
        parts = jax.random.normal(key, (depth, WIDTH, 3, WIDTH)) / WIDTH**0.5
        return {"parts": parts, "cast": jnp.ones((depth, WIDTH, WIDTH))}

    def layer(x, p):
        q, k, v = (jnp.tanh(x @ p["parts"][:, i]) for i in range(3))
        h = jnp.tanh(q * k + v).astype(jnp.float32)
        return jnp.tanh(h @ p["cast"].astype(jnp.float16).astype(jnp.float32)), None

    def loss(params, batch, keys):
        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.sum(x**2, axis=1)

    plan = px.Plan(data=4, zero=3, remat=remat, microbatches=microbatches)
    program = compiled(plan, px.Task(init=init, loss=loss), {"x": np.ones((16, WIDTH), np.float32)})
    own = {name: leaf.size * 4 for name, leaf in program.canonical_shapes.params.items()}
    # The cast is gathered in float16 or float32, whichever the compiler leaves last.
    planned = sum(
        c.bytes * c.trips for c in program.planned_collectives() if c.kind == "all-gather"
    )
    assert planned <= 2 * microbatches * sum(own.values())
    assert planned >= 2 * microbatches * own["parts"]
    assert counted(program.collectives()) == counted(program.planned_collectives())


def test_megatron_adds_up_twice_a_block_in_each_direction():
    program = transformer(tensor=TENSOR)
    found = [c for c in program.collectives() if c.bytes == RESIDUAL]
    assert {(c.kind, c.axes) for c in found} == {("all-reduce", ("tensor",))}
    in_loops = [c for c in found if c.in_loop]
    assert len(in_loops) == 4  # two in the forward loop, two in the backward loop
    assert {c.trips for c in in_loops} == {models.DEPTH}
    assert len(found) == 5  # and the gradient that the head hands back


@pytest.mark.ci
def test_sequence_parallelism_sends_the_same_bytes():
    """Forward, each all-reduce becomes a reduce-scatter and an all-gather of the same bytes.

    Backward there is one gather more for each of the two layers, of what they read forward and did
    not keep (Korthikanti et al. 2022, section 4.2.2).
    """
    program = transformer(sequence=True, tensor=TENSOR)
    loops = [c for c in program.collectives() if c.in_loop and c.bytes > 64 and c.axes]
    kinds = Counter(c.kind for c in loops)
    assert kinds["reduce-scatter"] == 4
    assert kinds["all-gather"] == 6
    assert kinds["all-reduce"] == kinds["all-to-all"] == 0
    reduce_scatters = sum(c.bytes_sent * c.trips for c in loops if c.kind == "reduce-scatter")
    gathers = sum(c.bytes_sent * c.trips for c in loops if c.kind == "all-gather")
    plain = transformer(tensor=TENSOR)
    all_reduces = sum(
        c.bytes_sent * c.trips for c in plain.collectives() if c.in_loop and c.bytes == RESIDUAL
    )
    assert reduce_scatters == pytest.approx(all_reduces / 2)
    assert gathers == pytest.approx(all_reduces / 2 * 6 / 4)


@pytest.mark.ci
def test_two_dims_send_the_sum_of_both():
    """Each over its own axis: activations over `tensor`, gradients over `data`."""
    program = transformer(data=2, tensor=3)
    gradients = sum(one.bytes for one in program.shardings)
    assert total(program, "all-reduce", "data") == pytest.approx(gradients, abs=64)
    on_tensor = total(program, "all-reduce", "tensor")
    assert on_tensor >= RESIDUAL * (4 * models.DEPTH + 1)
    assert total(program, "all-reduce", "data", "tensor") == 0


@pytest.mark.parametrize("sequence", [False, True])
def test_the_head_never_holds_the_logits(sequence):
    """Cross entropy over shards of the vocabulary: nothing in the program has its size."""
    words = 1536

    def init(key):
        params = models.transformer_init(key)
        return {**params, "head": jnp.zeros((models.WIDTH, words))}

    task = px.Task(init=init, loss=models.transformer_task().loss)
    plan = px.Plan(tensor=TENSOR, shardings=models.megatron(sequence))
    hlo = compiled(plan, task, models.text(4)).hlo()
    assert f"4,{models.TOKENS},{words // TENSOR}]" in hlo
    assert f"{models.TOKENS},{words}]" not in hlo


@pytest.mark.parametrize("sequence", [False, True])
def test_the_gradient_of_a_cast_table_is_added_up_in_its_shard(sequence):
    """No device holds a gradient of all words, in which it would have to find its own."""
    words = 1536
    other = models.transformer_task()

    def init(key):
        return {**other.init(key), "embedding": jnp.ones((words, models.WIDTH))}

    def loss(params, batch, keys):
        cast = params["embedding"].astype(jnp.float16).astype(jnp.float32)
        return other.loss({**params, "embedding": cast}, batch, keys)

    rules = {**models.megatron(sequence), "embedding": ("tensor", None)}
    plan = px.Plan(tensor=TENSOR, shardings=rules)
    program = compiled(plan, px.Task(init=init, loss=loss), models.text(4))
    shard = words // TENSOR
    assert f"[{shard},{models.WIDTH}]" in program.hlo()
    assert f"[{words},{models.WIDTH}]" not in program.hlo()


PLANNED = {
    "data": px.Plan(data=4, zero=1),
    "stack": px.Plan(data=6, zero=3, microbatches=2),
    "tensor": px.Plan(tensor=6, shardings=models.megatron()),
    "sequence": px.Plan(data=2, tensor=3, zero=2, shardings=models.megatron(sequence=True)),
}


@pytest.mark.parametrize(
    "name",
    # `data` and ZeRO are in the others too.
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "data")) for n in PLANNED],
)
def test_a_compiled_step_communicates_what_was_planned(name):
    program = compiled(PLANNED[name], models.transformer_task(), models.text(12))
    assert counted(program.collectives()) == counted(program.planned_collectives())


def test_a_slice_of_an_all_reduce_stands_for_a_reduce_scatter():
    """As compilers write it that form no reduce-scatter."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def local(x):
        summed = jax.lax.psum(x, "data")
        return jax.lax.dynamic_slice_in_dim(summed, jax.lax.axis_index("data") * 4, 4)

    spec = jax.P("data")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(run).lower(jnp.ones((64, 3))).compile().as_text()
    (found,) = collectives(text, mesh)
    assert (found.kind, found.equivalent_kind, found.bytes) == ("all-reduce", "reduce-scatter", 48)
    assert found.bytes_sent == 3 * 48


# --- Losses that couple examples ------------------------------------------------------------------

COUPLED = {
    "normed": (models.normed_task, {"data": 4, "zero": 1}),
    "normed, in microbatches": (models.normed_task, {"data": 4, "zero": 2, "microbatches": 2}),
    "contrastive": (models.contrastive_task, {"data": 4, "zero": 1}),
    "contrastive, zero 3": (models.contrastive_task, {"data": 2, "zero": 3}),
    "everything": (
        models.normed_task,
        {"data": 2, "tensor": 2, "zero": 1, "remat": "full",
         "shardings": {"hidden": (None, "tensor"), "bias": ("tensor",), "out": ("tensor", None)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    # Each loss is in another case.
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("normed", "contrastive"))) for n in COUPLED],
)
def test_a_coupled_step_communicates_what_was_planned(name):
    make, axes = COUPLED[name]
    program = compiled(px.Plan(**axes), make(), models.data(16))
    assert counted(program.collectives()) == counted(program.planned_collectives())


def counted(collectives):
    """Bytes by kind and axes, loops counted by their turns."""
    found = Counter()
    for one in collectives:
        kind = getattr(one, "equivalent_kind", "") or one.kind
        found[kind, one.axes] += one.bytes * one.trips
    return found


def test_batch_norm_sends_its_statistics_and_nothing_by_example():
    """Mean and variance of each unit, forward and backward; gradients once, in their shards."""
    for rows in (16, 64):
        program = compiled(px.Plan(data=4, zero=1), models.normed_task(), models.data(rows))
        gradients = sum(one.optimizer_bytes for one in program.shardings)
        parameters = sum(one.bytes for one in program.shardings)
        found = counted(program.planned_collectives())
        # Besides: how many examples there are, the sums of losses and metrics, the norm.
        found["all-reduce", ("data",)] -= 5 * 4
        assert found == {
            ("all-reduce", ("data",)): 4 * models.HIDDEN * 4,
            ("reduce-scatter", ("data",)): gradients,
            ("all-gather", ("data",)): parameters,
        }


@pytest.mark.ci
def test_a_contrastive_loss_moves_rows_and_no_pairs():
    """Of `other @ other.T` one side is gathered: what is sent grows as the rows do."""

    @functools.cache
    def sent(rows):
        program = compiled(px.Plan(data=4, zero=1), models.contrastive_task(), models.data(rows))
        return sum(counted(program.planned_collectives()).values())

    assert sent(64) - sent(32) == 2 * (sent(32) - sent(16)) > 0
