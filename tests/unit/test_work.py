"""What a device does in a step: counted on the traced program, and by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
from tests import models
from tests.unit.test_liveness import flat, perceptron, transformer

import plurax as px
from plurax.execute.recorder import record_step
from plurax.trace.collectives import planned_collectives
from plurax.trace.work import Product, Work, work

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

    counts = [dict(work(flat(fun, x), {}).products) for fun in (loop, branch, unknown)]
    assert counts == [{one: 5}, {one: 1}, {one: 1}]


def test_rows_of_a_stack_are_read_one_at_a_time():
    xs = jax.ShapeDtypeStruct((8, 128), FLOAT)
    found = work(flat(lambda xs: jax.lax.scan(lambda c, x: (c + x, x * 2), xs[0], xs), xs), {})
    # The sum reads a row and the carry and writes it; the product reads a row and writes one.
    assert found.bytes == 8 * 5 * 128 * 4 + 2 * 128 * 4  # and the first row is copied


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
