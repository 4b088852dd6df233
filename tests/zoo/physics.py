"""Networks of numerical mathematics: Fourier transforms, derivatives, loops without a known end."""

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg

from tests.zoo.by_hand import Model, complex_matrix, matrix

GRID, WIDTH, MODES = 8, 4, 3


def points(rng, count):
    return {"x": rng.normal(size=(count, 4)), "y": rng.normal(size=(count, 2))}


# --- Fourier operator: complex parameters ---------------------------------------------------------


def fno_init(key):
    keys = jax.random.split(key, 4)
    return {
        "lift": matrix(keys[0], 1, WIDTH),
        "modes": complex_matrix(keys[1], MODES, WIDTH, WIDTH),
        "skip": matrix(keys[2], WIDTH, WIDTH),
        "out": matrix(keys[3], WIDTH, 1),
    }


def fno_loss(mark, params, batch, keys):
    x = mark(batch["x"] @ params["lift"])
    modes = jnp.fft.rfft(x, axis=1)[:, :MODES]
    modes = jnp.einsum("bmi,mio->bmo", modes, params["modes"])
    modes = jnp.pad(modes, ((0, 0), (0, GRID // 2 + 1 - MODES), (0, 0)))
    x = mark(jax.nn.gelu(jnp.fft.irfft(modes, n=GRID, axis=1) + x @ params["skip"]))
    error = (x @ params["out"] - jnp.roll(batch["x"], 1, 1)) ** 2
    return error.mean((1, 2)), {"worst": error.max((1, 2))}


FNO = Model(
    fno_init,
    fno_loss,
    lambda rng, count: {"x": rng.normal(size=(count, GRID, 1))},
    {"modes": (None, None, "tensor"), "skip": (None, "tensor"), "out": ("tensor", None)},
)


# --- Physics informed: derivatives of the network by its inputs, then by its parameters -----------


def pinn_init(key):
    keys = jax.random.split(key, 3)
    return {
        "in": matrix(keys[0], 2, 8),
        "bias": jnp.zeros(8),
        "inner": matrix(keys[1], 8, 8),
        "out": matrix(keys[2], 8),
    }


def pinn_loss(mark, params, batch, keys):
    def u(x, t):
        h = jnp.tanh(jnp.stack([x, t]) @ params["in"] + params["bias"])
        return jnp.tanh(mark(h) @ params["inner"]) @ params["out"]

    def one(point, start):
        x, t = point
        u_t = jax.grad(u, argnums=1)(x, t)
        u_xx = jax.grad(jax.grad(u))(x, t)
        return (u_t - 0.5 * u_xx) ** 2 + (u(start, 0.0) - jnp.sin(start)) ** 2, jnp.abs(u_t)

    losses, slope = jax.vmap(one)(batch["x"][:, :2], batch["x"][:, 2])
    return losses, {"slope": slope}


PINN = Model(
    pinn_init,
    pinn_loss,
    points,
    {"in": (None, "tensor"), "bias": ("tensor",), "inner": ("tensor", None)},
)


# --- Neural ODE: a while loop forwards, another one backwards -------------------------------------


def field(params, y):
    return jnp.tanh(y @ params["in"] + params["bias"][None]) @ params["out"]


@jax.custom_vjp
def flow(params, y):
    """Euler's method up to time 1."""

    def turn(carry):
        t, y = carry
        return t + 0.125, y + 0.125 * field(params, y)

    return jax.lax.while_loop(lambda carry: carry[0] < 0.99, turn, (0.0, y))[1]


def flow_forward(params, y):
    end = flow(params, y)
    return end, (params, y)


def flow_backward(kept, change):
    """By running forward to each step again: slow, exact, and a loop in a loop."""
    params, start = kept

    def until(number):
        return jax.lax.while_loop(
            lambda carry: carry[0] < number,
            lambda carry: (carry[0] + 1, carry[1] + 0.125 * field(params, carry[1])),
            (0, start),
        )[1]

    def turn(carry):
        number, change, total = carry
        _, back = jax.vjp(lambda p, y: y + 0.125 * field(p, y), params, until(number))
        grads, change = back(change)
        return number - 1, change, jax.tree.map(jnp.add, total, grads)

    zeros = jax.tree.map(jnp.zeros_like, params)
    _, change, total = jax.lax.while_loop(lambda c: c[0] >= 0, turn, (7, change, zeros))
    return total, change


flow.defvjp(flow_forward, flow_backward)


def ode_init(key):
    keys = jax.random.split(key, 3)
    field = {"in": matrix(keys[0], 4, 8), "bias": jnp.zeros(8), "out": matrix(keys[1], 8, 4)}
    return {"field": field, "head": matrix(keys[2], 4, 2)}


def ode_loss(mark, params, batch, keys):
    y = mark(flow(params["field"], mark(batch["x"])))
    return ((y @ params["head"] - batch["y"]) ** 2).sum(1), {"size": jnp.abs(y).max(1)}


ODE = Model(
    ode_init,
    ode_loss,
    points,
    {"*/in": (None, "tensor"), "*/bias": ("tensor",), "*/out": ("tensor", None)},
)


# --- Deep equilibrium: each example turns until it stands still -----------------------------------


def stand(fun, start):
    """The fixed point of `fun`, for one example."""

    def on(carry):
        old, new, turns = carry
        return (jnp.abs(new - old).max() > 1e-14) & (turns < 200)

    return jax.lax.while_loop(
        on, lambda carry: (carry[1], fun(carry[1]), carry[2] + 1), (start, fun(start), 0)
    )[1]


@jax.custom_vjp
def equilibrium(params, x):
    return stand(lambda z: jnp.tanh(z @ params["again"] + x), jnp.zeros(6))


def equilibrium_forward(params, x):
    z = equilibrium(params, x)
    return z, (params, x, z)


def equilibrium_backward(kept, change):
    params, x, z = kept
    _, back = jax.vjp(lambda p, x, z: jnp.tanh(z @ p["again"] + x), params, x, z)
    total = stand(lambda u: change + back(u)[2], jnp.zeros(6))
    return back(total)[:2]


equilibrium.defvjp(equilibrium_forward, equilibrium_backward)


def deq_init(key):
    keys = jax.random.split(key, 3)
    inner = {"again": matrix(keys[0], 6, 6, scale=0.15)}
    return {"in": matrix(keys[1], 4, 6), "inner": inner, "head": matrix(keys[2], 6, 2)}


def deq_loss(mark, params, batch, keys):
    x = mark(batch["x"] @ params["in"])
    z = mark(jax.vmap(equilibrium, (None, 0))(params["inner"], x))
    return ((z @ params["head"] - batch["y"]) ** 2).sum(1), {}


DEQ = Model(deq_init, deq_loss, points, {"inner/again": (None, "tensor")})


# --- A branch on a parameter: weights are scaled down where their norm is too large ---------------


def clipped_init(key):
    keys = jax.random.split(key, 3)
    return {
        "in": matrix(keys[0], 4, 8, scale=1.0),
        "inner": matrix(keys[1], 8, 8, scale=0.01),
        "out": matrix(keys[2], 8, 2),
    }


def clipped_loss(mark, params, batch, keys):
    def bounded(w):
        norm = jnp.sqrt(jnp.sum(w**2))
        return jax.lax.cond(norm > 1, lambda: w / norm, lambda: w * 1.5)

    hidden = mark(jnp.tanh(batch["x"] @ bounded(params["in"])))
    hidden = mark(hidden + jnp.tanh(hidden @ bounded(params["inner"])))
    return ((hidden @ params["out"] - batch["y"]) ** 2).sum(1), {}


CLIPPED = Model(
    clipped_init, clipped_loss, points, {"in": (None, "tensor"), "out": ("tensor", None)}
)


# --- Implicit layers: linear systems, and a root that is turned to until it stands still ----------


def root(params, x):
    """The root of `z - tanh(z @ again + x)`: as many turns as it takes, with no limit."""

    def turns(fun, start):
        return jax.lax.while_loop(
            lambda z: jnp.abs(fun(z)).max() > 1e-14, lambda z: z - fun(z), start
        )

    def tangent(fun, y):
        return jnp.linalg.solve(jax.jacobian(fun)(y), y)

    return jax.lax.custom_root(
        lambda z: z - jnp.tanh(z @ params["again"] + x), jnp.zeros(6), turns, tangent
    )


def implicit_init(key):
    spread = matrix(jax.random.fold_in(key, 3), 6, 6, scale=0.3)
    return {**deq_init(key), "spread": spread, "unused": jnp.ones((6, 2))}  # by no stage


def implicit_loss(mark, params, batch, keys):
    definite = jnp.eye(6) + params["spread"] @ params["spread"].T

    def solved(row):
        return cg(lambda v: definite @ v, row, tol=1e-14)[0]

    x = mark(jax.vmap(solved)(batch["x"] @ params["in"]))
    z = mark(jax.vmap(root, (None, 0))(params["inner"], x))
    y = z @ jnp.linalg.solve(definite, params["head"])
    return ((y - batch["y"]) ** 2).sum(1), {}


IMPLICIT = Model(
    implicit_init,
    implicit_loss,
    points,
    {"inner/again": (None, "tensor"), "spread": ("tensor", None)},
)
