"""What a device does in a step: counted on the traced program, and by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
from tests import models
from tests.unit.test_liveness import flat, perceptron, transformer

import plurax as px
from plurax.execute.recorder import record_step
from plurax.partition.scopes import IF_UNEVEN
from plurax.trace.clock import Clock
from plurax.trace.collectives import planned_collectives
from plurax.trace.compilers import rules_of
from plurax.trace.flatten import Flattener
from plurax.trace.kernels import kernels
from plurax.trace.step_trace import Value
from plurax.trace.work import Product, Sending, Work, work, work_of

FLOAT = jnp.float32


def of_plan(model, optimizer=None, **plan):
    task, batch, shardings = model()
    if plan.get("tensor", 1) > 1:
        plan["shardings"] = shardings
    traced = record_step(task, optimizer or optax.sgd(0.1), px.Plan(**plan), batch)
    return work(traced.block, traced.plan.axes), traced


def test_the_products_of_a_perceptron():
    """2·B·D² for each layer: forward, its weights' gradient, and its input's but of the first."""
    rows, width, layers = 512, 256, 4
    found, _ = of_plan(perceptron)
    assert found.product_flops == 2 * rows * width**2 * (3 * layers - 1)
    assert sum(found.products.values()) == 3 * layers - 1
    assert {product.dtype for product in found.products} == {"float32"}


@pytest.mark.parametrize("plan", [{}, {"data": 4}, {"microbatches": 4}, {"data": 2, "zero": 3}])
def test_the_products_of_a_transformer(plan):
    """Forward, and twice as much backward; the loop over layers counts once for each."""
    rows, tokens, width, depth, words = 16, 64, 128, 4, 256
    block = 2 * tokens * width * (12 * width + 2 * tokens)
    every = rows * (depth * block + 2 * tokens * width * words)
    found, _ = of_plan(transformer, **plan)
    assert found.product_flops == 3 * every // plan.get("data", 1)


def test_tensor_divides_the_products_and_remat_adds_a_forward_pass():
    whole, _ = of_plan(transformer)
    half, _ = of_plan(transformer, tensor=2)
    assert half.product_flops == whole.product_flops / 2
    again, _ = of_plan(transformer, remat="full")
    # Not a third more: the last product of a segment is not needed again.
    assert 1.2 < again.product_flops / whole.product_flops <= 4 / 3


def test_bfloat16_products_are_of_that_dtype():
    found, _ = of_plan(perceptron, precision="bfloat16")
    assert {product.dtype for product in found.products} == {"bfloat16"}


def test_a_convolution_is_a_product():
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, w = (jax.ShapeDtypeStruct(shape, FLOAT) for shape in ((8, 16, 16, 4), (3, 3, 4, 32)))
    found = work(flat(conv, x, w), {})
    (product,) = found.products
    assert (product.m, product.n, product.k, product.batch) == (8 * 16 * 16, 32, 3 * 3 * 4, 1)
    assert product.bytes == 4 * (8 * 16 * 16 * 4 + 3 * 3 * 4 * 32 + 8 * 16 * 16 * 32)


def test_a_chain_of_elementwise_operations_reads_and_writes_once():
    x = jax.ShapeDtypeStruct((1024, 64), FLOAT)
    found = work(flat(lambda x, y: jnp.tanh(x * 2 + y), x, x), {})
    assert (found.kernels, found.bytes) == (1, 3 * 4 * 1024 * 64)
    assert found.other_flops == 3 * 1024 * 64
    assert not found.products


def test_loops_and_branches():
    x = jax.ShapeDtypeStruct((64, 64), FLOAT)
    one = Product(64, 64, 64, 1, "float32", 2 * 4 * 64 * 64)

    def loop(x):
        return jax.lax.scan(lambda h, _: (h @ h, None), x, None, length=5)[0]

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x)

    def unknown(x):
        return jax.lax.while_loop(lambda h: h[0, 0] < 1, lambda h: h @ h, x)

    def uneven(x):
        with jax.named_scope(IF_UNEVEN):
            return unknown(x @ x)

    counts = [dict(work(flat(fun, x), {}).products) for fun in (loop, branch, unknown, uneven)]
    assert counts == [{one: 5}, {one: 1}, {one: 1}, {one: 1}]


@pytest.mark.parametrize(("platform", "times"), [("cpu", 8), ("gpu", 8), ("tpu", 1)])
def test_products_of_groups(platform, times):
    """(512, 32) by 8 groups of (32, 16): TPUs have a kernel but for the gradient of weights."""
    shapes = ((512, 32), FLOAT), ((8, 32, 16), FLOAT), ((8,), jnp.int32)
    x, w, sizes = (jax.ShapeDtypeStruct(*shape) for shape in shapes)

    def loss(x, w, sizes):
        return (jax.lax.ragged_dot(x, w, sizes) ** 2).sum()

    found = work(flat(jax.grad(loss, (0, 1)), x, w, sizes), {}, rules_of(platform))
    assert found.product_flops == 2 * 512 * 32 * 16 * (times + times + 8)


def test_rows_of_a_stack_are_read_one_at_a_time():
    xs = jax.ShapeDtypeStruct((8, 128), FLOAT)
    found = work(flat(lambda xs: jax.lax.scan(lambda c, x: (c + x, x * 2), xs[0], xs), xs), {})
    # The sum reads a row and the carry and writes it; the product reads a row and writes one.
    # And the first row is copied, and the stack of results begins with zeros.
    assert found.bytes == 8 * 5 * 128 * 4 + 2 * 128 * 4 + 8 * 128 * 4


def test_data_parallel_sums_each_gradient_once():
    found, traced = of_plan(perceptron, data=4, microbatches=2)
    assert planned_collectives(traced) == []  # what is not planned is counted here
    gradients = traced.memory.gradients
    (kinds,) = {(one.kind, one.axes) for one in found.collectives}
    assert kinds == ("all-reduce", ("data",))
    assert sum(one.bytes for one in found.collectives) == gradients + 2 * 4  # and loss and weight


def test_what_the_compiler_counts_of_a_program_without_loops():
    """XLA counts some operations twice that are in two kernels, and transcendentals apart."""
    task, batch, _ = perceptron()
    found, _ = of_plan(perceptron)
    program = px.compile(task, optax.sgd(0.1), px.Plan(), batch)
    assert found.flops == pytest.approx(program.compiled.cost_analysis()["flops"], rel=0.03)


def test_a_sum_of_work():
    product = Product(2, 3, 4, 5, "float32", 10)
    part = Work({product: 2}, other_flops=7, bytes=11, kernels=3)
    every = Work.sum([part, part.times(2)])
    assert every.products == {product: 6}
    assert (every.other_flops, every.bytes, every.kernels) == (21, 33, 9)
    assert every.flops == 6 * 2 * 2 * 3 * 4 * 5 + 21


def test_a_pipelines_program_is_counted():
    task, batch = models.transformer_stack(), models.text(8)
    plan = px.Plan(pipeline=2, microbatches=4)
    traced = record_step(task, optax.sgd(0.1), plan, batch)
    found = work(traced.block, plan.axes)
    assert found.products
    assert {one.kind for one in found.collectives} >= {"collective-permute"}


# --- By the rules of GPUs -------------------------------------------------------------------------

NUMBERS = (512, 1024)
BYTES = 4 * 512 * 1024


def on_gpu(fun, *args):
    return work(flat(fun, *args), {}, rules_of("gpu"))


def arrays(count, shape=NUMBERS):
    return [jax.ShapeDtypeStruct(shape, FLOAT)] * count


def test_adam_reads_each_array_once():
    def adam(p, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    assert (on_gpu(adam, *arrays(4)).kernels, on_gpu(adam, *arrays(4)).bytes) == (1, 7 * BYTES)
    apart = work(flat(adam, *arrays(4)), {})
    assert (apart.kernels, apart.bytes) == (3, 10 * BYTES)


def test_a_softmax_is_one_kernel():
    """It reads the scores once and writes the weights; a row's maximum and sum are small."""
    found = on_gpu(lambda x: jax.nn.softmax(x), *arrays(1))
    assert found.kernels == 1
    assert 2 * BYTES <= found.bytes < 2.02 * BYTES


def test_a_sum_over_columns_is_not_read_by_its_own_kernel():
    """Each column is spread over all blocks of the kernel, which do not wait for each other."""
    found = on_gpu(lambda x: x / x.sum(0, keepdims=True), *arrays(1))
    assert found.kernels == 2
    assert 3 * BYTES <= found.bytes < 3.02 * BYTES


def test_what_waits_for_another_kernel_is_not_joined_to_the_first():
    """The last one reads `x` as the first does, and a sum of what that computes."""

    def fun(x):
        first = jnp.tanh(x)
        return first, x * first.sum(0, keepdims=True)

    assert on_gpu(fun, *arrays(1)).kernels == 3


def test_what_is_read_in_another_order_is_not_joined():
    square = jax.ShapeDtypeStruct((512, 512), FLOAT)
    assert on_gpu(lambda x: (jnp.tanh(x), 2 * x), square).kernels == 1
    assert on_gpu(lambda x: (jnp.tanh(x), 2 * x.T), square).kernels == 2


def test_what_products_read_transposed_is_computed_once():
    """The kernel of a product with its tanh is not computed for each product that reads it."""

    def fun(x, w, v):
        h = jnp.tanh(jnp.einsum("bi,mij->bmj", x, w))
        return jnp.einsum("bmj,mjk->mbk", h, v), jnp.einsum("bmj,bmk->mjk", h, h)

    shapes = ((64, 32), (5, 32, 48), (5, 48, 16))
    jaxpr = jax.make_jaxpr(fun)(*(jnp.zeros(shape) for shape in shapes)).jaxpr
    block = Flattener({}).block(jaxpr, [Value(var.aval) for var in jaxpr.invars])
    flops = 2 * 5 * 64 * (32 * 48 + 48 * 16 + 48 * 48)
    for platform in ("cpu", "gpu", "tpu"):
        assert work(block, {}, rules_of(platform)).product_flops == flops


def test_a_product_with_what_follows_it_is_a_product():
    x, w = jax.ShapeDtypeStruct((64, 32), FLOAT), jax.ShapeDtypeStruct((32, 16), FLOAT)
    found = on_gpu(lambda x, w: jnp.tanh(x @ w), x, w)
    moved = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert found.products == {Product(64, 16, 32, 1, "float32", moved): 1}
    assert (found.kernels, found.bytes) == (1, 0)


def sending(fun, platform):
    """Return the seconds of a function of shards, of which the first is summed over `data`."""
    machine = px.Machine.preset("8xH100-80GB")
    block = flat_on({"data": 8}, mapped(fun), *arrays(2, (2048, 2048)))
    return Clock(px.Plan(data=8), machine).seconds(work(block, {"data": 8}, rules_of(platform)))


def flat_on(sizes, fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    return Flattener(sizes).block(closed.jaxpr, [Value(var.aval) for var in closed.jaxpr.invars])


def test_a_collective_is_hidden_by_what_does_not_wait_for_it():
    def beside(x, y):
        return jax.lax.psum(x, "data"), y @ (y @ (y @ y))

    def before(x, y):
        return jax.lax.psum(x, "data") @ y, y

    apart, hidden, waits = (
        sending(beside, "cpu"), sending(beside, "gpu"), sending(before, "gpu")
    )  # fmt: skip
    sent = apart.collectives["data"]
    assert apart.hidden == 0
    assert hidden.products > sent
    assert (hidden.collectives, hidden.hidden) == ({"data": 0.0}, sent)
    assert (waits.collectives, waits.hidden) == ({"data": sent}, 0.0)
    assert waits.total == pytest.approx(waits.products + sent + waits.overhead)


def test_work_beside_two_collectives_hides_them_once():
    """Each is hidden in proportion to its seconds, and for the rest of them a device waits."""

    def fun(x, y):
        z = y + 1.0
        return jax.lax.psum(x, "data"), jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), z

    seconds = sending(fun, "gpu")
    sent = seconds.hidden + sum(seconds.collectives.values())
    assert 0 < seconds.hidden < sent
    machine = px.Machine.preset("8xH100-80GB")
    own = machine.traffic_seconds(2 * 4 * 2048**2) + machine.start_seconds
    assert seconds.hidden == pytest.approx(own)


def test_work_that_is_repeated_is_beside_each_repetition():
    (sent,) = sending_of_a_loop().sending
    assert isinstance(sent, Sending)
    assert [one.trips for one in sent.collectives] == [5]
    ((beside, places),) = sent.beside
    assert places == {0}
    assert sum(beside.products.values()) == 1


def test_what_waits_for_a_part_left_out_hides_nothing():
    """The sum waits for a loop, and the loop for what is before it."""

    def fun(x, y):
        before = jnp.tanh(x @ y)
        last, _ = jax.lax.scan(lambda c, _: (c @ y, None), before, None, length=3)
        return before, jax.lax.psum(last, "data")

    block = flat_on({"data": 8}, mapped(fun), *arrays(2, (64, 64)))
    every = kernels(block, rules=rules_of("gpu"))
    loop = next(kernel for kernel in every if kernel.root.name == "scan")
    rest = work_of(every, {"data": 8}, without=[loop])
    assert sum(rest.products.values()) == 1
    assert [one.beside for one in rest.sending] == [()]


def mapped(fun):
    mesh, spec = jax.sharding.AbstractMesh((8,), ("data",)), jax.sharding.PartitionSpec()
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def sending_of_a_loop():
    def body(carry, _):
        x, y = carry
        return (jax.lax.psum(x, "data"), y @ y), None

    def fun(x, y):
        return jax.lax.scan(body, (x, y), None, length=5)[0]

    block = flat_on({"data": 8}, mapped(fun), *arrays(2, (64, 64)))
    return work(block, {"data": 8}, rules_of("gpu"))


# --- The fast memory of a TPU ---------------------------------------------------------------------


def bytes_moved(fun, *args, room):
    """The bytes of products and of other kernels, by the rules of TPUs."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    inputs = [Value(var.aval) for var in jaxpr.invars]
    block = Flattener({}).block(jaxpr, inputs)
    every = kernels(block, rules=rules_of("tpu"))
    counted = work_of(every, {}, fast_memory=room)
    products = sum(product.bytes * count for product, count in counted.products.items())
    return products + counted.bytes


def two_layers(x, w, v):
    return jnp.tanh(x @ w) @ v


def test_what_fits_the_fast_memory_is_neither_written_nor_read():
    size = 4 * 256 * 256
    x = w = v = jnp.zeros((256, 256))
    # Three arguments, the result, and what is between the two products, once written and once read.
    assert bytes_moved(two_layers, x, w, v, room=0) == 6 * size
    assert bytes_moved(two_layers, x, w, v, room=size - 1) == 6 * size
    assert bytes_moved(two_layers, x, w, v, room=size) == 4 * size


def test_there_is_room_for_those_in_use_the_shortest():
    size = 4 * 256 * 256

    def fun(x, w):
        first = x @ w  # in use while the four others are computed
        other = x.T @ w
        for _ in range(3):
            other = other @ w
        return first @ other

    x = w = jnp.zeros((256, 256))
    every = bytes_moved(fun, x, w, room=0)
    assert bytes_moved(fun, x, w, room=3 * size) == every - 2 * 5 * size
    # Each of the four is in use beside the one before it, and `first` would take the room of two.
    assert bytes_moved(fun, x, w, room=2 * size) == every - 2 * 4 * size


def test_weights_of_a_recurrence_are_fetched_once():
    size, steps = 4 * 128 * 128, 10

    def fun(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=steps)[0]

    x = w = jnp.zeros((128, 128))
    assert bytes_moved(fun, x, w, room=0) == 3 * steps * size
    assert bytes_moved(fun, x, w, room=3 * size) == 3 * steps * size
    # The weights and the carry take half of it: no iteration reads or writes the large memory.
    assert bytes_moved(fun, x, w, room=4 * size) == size


def test_arguments_and_results_are_in_the_large_memory():
    size = 4 * 256 * 256
    x = jnp.zeros((256, 256))
    assert bytes_moved(lambda x: jnp.tanh(x), x, room=100 * size) == 2 * size


# --- Kernels in Pallas ----------------------------------------------------------------------------


def test_flash_attention_is_its_products_block_by_block():
    """Two forward; backward four for keys and values and three for queries, in two kernels."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    rows, heads, tokens, width, block = 2, 2, 512, 128, 128
    q = k = v = jnp.zeros((rows, heads, tokens, width))

    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v, causal=True))

    counted = work(flat(jax.grad(loss, argnums=(0, 1, 2)), q, k, v), {})
    grid = rows * heads * (tokens // block) ** 2
    assert {(p.m, p.n, p.k, p.batch, p.dtype) for p in counted.products} == {
        (block, block, width, 1, "float32")
    }
    assert sorted(counted.products.values()) == [2 * grid, 3 * grid, 4 * grid]
    assert counted.product_flops == 9 * 2 * rows * heads * tokens**2 * width


def test_a_kernel_without_products_is_traffic():
    from jax.experimental import pallas as pl

    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    x = jnp.zeros((256, 128))
    fun = pl.pallas_call(double, out_shape=x)
    counted = work(flat(fun, x), {})
    assert (counted.products, counted.bytes, counted.kernels) == ({}, 2 * 4 * x.size, 1)
