"""Convolutions have the order of dims that is fast on CPU, in every loop, and the same numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.models import max_rel_error

import plurax as px
from plurax.jaxpr.convolutions import channels_last

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
    assert max_rel_error(channels_last(grad)(*args), grad(*args)) < 1e-12
    batched, many = jax.vmap(grad), [np.stack([one, 2 * one]) for one in args]
    assert max_rel_error(jax.vmap(channels_last(grad))(*many), batched(*many)) < 1e-12


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
