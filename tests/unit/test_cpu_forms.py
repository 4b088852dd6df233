"""Convolutions and products have the forms that are fast on CPU, in loops too."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.models import max_rel_error

import plurax as px
from plurax.jaxpr.cpu_forms import in_cpu_forms
from plurax.jaxpr.interpret import all_equations

CASES = {
    "channels last": {"dims": ("NHWC", "HWIO", "NHWC")},
    "channels first": {"dims": ("NCHW", "OIHW", "NCHW")},
    "mixed": {"dims": ("NCHW", "HWIO", "HWNC")},
    "strides and dilation": {
        "dims": ("NCHW", "OIHW", "NCHW"),
        "strides": (2, 1),
        "dilation": (1, 2),
    },
    "groups": {"dims": ("NCHW", "OIHW", "NCHW"), "groups": 2},
}


def convolution(dims, strides=(1, 1), dilation=(1, 1), groups=1):
    """A scalar function of images and a kernel, and arguments for it."""
    rng = np.random.default_rng(0)
    sizes = {"N": 3, "C": 4, "H": 6, "W": 5}
    x = rng.normal(size=[sizes[dim] for dim in dims[0]])
    sizes = {"O": 6, "I": 4 // groups, "H": 3, "W": 2}
    kernel = rng.normal(size=[sizes[dim] for dim in dims[1]])

    def fun(x, kernel):
        out = jax.lax.conv_general_dilated(
            x, kernel, strides, "SAME", rhs_dilation=dilation, dimension_numbers=dims,
            feature_group_count=groups,
        )  # fmt: skip
        return jnp.tanh(out).sum(), out

    return fun, (x, kernel)


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_and_its_derivatives_are_the_same(x64, name):
    fun, args = convolution(**CASES[name])
    grad = jax.value_and_grad(fun, (0, 1), has_aux=True)
    assert max_rel_error(in_cpu_forms(grad)(*args), grad(*args)) < 1e-12
    batched, many = jax.vmap(grad), [np.stack([one, 2 * one]) for one in args]
    assert max_rel_error(jax.vmap(in_cpu_forms(grad))(*many), batched(*many)) < 1e-12


def init(key):
    a, b = jax.random.split(key)
    return {"kernel": jax.random.normal(a, (4, 2, 3)), "out": jax.random.normal(b, (4, 3))}


def outputs(params, batch):
    y = jax.lax.conv(jax.lax.conv(batch["x"], params["kernel"], (1,), "SAME"),
                     params["kernel"].repeat(2, 1), (1,), "SAME")  # fmt: skip
    return jnp.tanh(y).mean(2) @ params["out"]


def loss(params, batch, keys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs(params, batch), batch["y"])


def coupled(params, batch, keys, mask):
    return loss(params, batch, keys) * jnp.where(mask, 1.0, 0.0)


ROWS = {"x": np.ones((8, 2, 10), np.float32), "y": np.zeros(8, np.int32)}
PROGRAMS = {
    "microbatches": (px.Task(init=init, loss=loss), px.Plan(microbatches=2), None),
    "members": (px.Task(init=init, loss=loss), px.Plan(chunk=1), px.Members(4)),
    "split": (
        px.Task(init=init, loss=coupled, coupled=True), px.Plan(data=2, microbatches=2), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_a_loop_too_every_convolution_has_the_channels_last(name):
    task, plan, members = PROGRAMS[name]
    program = px.compile(task, optax.sgd(0.1), plan, ROWS, members=members)
    found = re.findall(r"convolution\(.*dim_labels=(\S+?),", program.hlo())
    assert len(found) >= 3
    assert set(found) == {"b0f_0io->b0f"}


# --- Products -------------------------------------------------------------------------------------


def by_einsum(dims, *shapes):
    """A product as a function of its operands, and operands."""
    rng = np.random.default_rng(0)
    return lambda x, y: jnp.einsum(dims, x, y), [rng.normal(size=shape) for shape in shapes]


def in_a_loop(dims, *shapes):
    fun, args = by_einsum(dims, *shapes)

    def looped(x, y):
        return jax.lax.scan(lambda carry, row: (carry, fun(row, y)), 0, x)[1]

    return looped, [np.stack([args[0]] * 3), args[1]]


PRODUCTS = {
    "of a weight": (by_einsum("btf,btw->fw", (3, 4, 5), (3, 4, 2)), 1),
    "dims between": (by_einsum("cbthk,btd->dchk", (3, 4, 5, 2, 2), (4, 5, 3)), 1),
    "with a batch": (by_einsum("nbtf,nbtw->nfw", (2, 3, 4, 5), (2, 3, 4, 2)), 1),
    "with a batch behind": (by_einsum("btnf,btnw->nfw", (3, 4, 2, 5), (3, 4, 2, 2)), 1),
    "in a loop": (in_a_loop("btf,btw->fw", (3, 4, 5), (3, 4, 2)), 1),
    "in a call": ((jax.jit(by_einsum("btf,btw->fw", (3, 4, 5), (3, 4, 2))[0]),
                   by_einsum("btf,btw->fw", (3, 4, 5), (3, 4, 2))[1]), 1),
    "in two orders": (by_einsum("btf,tbw->fw", (3, 4, 5), (4, 3, 2)), 2),
    "apart": (by_einsum("bft,btw->fw", (3, 5, 4), (3, 4, 2)), 2),
    "three of three": (by_einsum("abc,abc->", (3, 4, 5), (3, 4, 5)), 1),
    "one": (by_einsum("ab,bc->ac", (3, 4), (4, 5)), 1),
    "none": (by_einsum("a,b->ab", (3,), (4,)), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_sums_over_one_dim_where_dims_are_adjacent(x64, name):
    (fun, args), count = PRODUCTS[name]
    assert max_rel_error(in_cpu_forms(fun)(*args), fun(*args)) < 1e-12
    traced = all_equations(jax.make_jaxpr(in_cpu_forms(fun))(*args).jaxpr)
    products = [eqn for eqn in traced if eqn.primitive.name == "dot_general"]
    assert [len(eqn.params["dimension_numbers"][0][0]) for eqn in products] == [count]


WIDTH, WIDER, ROWS_OF_WORDS = 12, 40, (8, 16)
WORDS = {"x": np.ones((*ROWS_OF_WORDS, WIDTH), np.float32)}


def of_words(params, batch, keys=None):
    """Losses of a network of two layers that computes word by word, its layers in a loop."""

    def layer(x, p):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, batch["x"], params)
    return (x**2).mean((1, 2))


def init_of_words(key):
    shapes = {"up": (2, WIDTH, WIDER), "down": (2, WIDER, WIDTH)}
    return {name: jax.random.normal(key, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("plan", [
    px.Plan(), px.Plan(microbatches=2), px.Plan(remat="full"), px.Plan(remat="dots"),
    px.Plan(tensor=2, shardings={"up": (None, None, "tensor"), "down": (None, "tensor", None)}),
])  # fmt: skip
def test_no_gradient_of_an_activation_is_transposed_on_cpu(plan):
    """By hand XLA copies it transposed, together with all that computes it."""
    task, words = px.Task(init=init_of_words, loss=of_words), math.prod(ROWS_OF_WORDS)
    transposed = f"f32[{WIDER // plan.tensor},{words // plan.microbatches}]"
    hlo = px.compile(task, optax.sgd(0.1), plan, WORDS).hlo()
    assert transposed not in hlo
    by_hand = jax.jit(jax.grad(lambda params: of_words(params, WORDS).mean()))
    text = by_hand.lower(init_of_words(jax.random.key(0))).compile().as_text()
    assert f"f32[{WIDER},{words}]" in text  # else this is no longer needed
