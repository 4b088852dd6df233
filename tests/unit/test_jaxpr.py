"""The names of primitives and parameters on the installed JAX; the interpreter of jaxprs."""

import ast
import importlib
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as fused_attention
from jax.experimental import pallas as pl
from jax.experimental.sparse import BCOO
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plurax as px
from plurax.execute.layouts.state_shardings import stacks
from plurax.jaxpr import compat
from plurax.jaxpr.compat import Scan, is_call
from plurax.jaxpr.interpret import all_equations, flat_equations, interpret
from plurax.partition.manual import _HANDLERS, eval_manual_body
from plurax.partition.operators import RULES

NEWER_JAX = jax.__version_info__ >= (0, 11)
ABSENT = compat.ONLY_OLDER if NEWER_JAX else compat.ONLY_NEWER
SOURCE = Path(px.__file__).parent
ATTENTION = (
    "dropout_rate",
    "layout",
    "mask_type",
    "scale",
    "sliding_window_length",
    "variadic_args",
)
PARAMETERS = {
    "all_gather_invariant": ("all_gather_dimension", "axis_name", "tiled"),
    "argmax": ("axes", "index_dtype"),
    "bcoo_dot_general": ("dimension_numbers", "lhs_spinfo"),
    "broadcast_in_dim": ("broadcast_dimensions",),
    "concatenate": ("dimension",),
    "cond": ("branches",),
    "conv_general_dilated": (
        "batch_group_count",
        "dimension_numbers",
        "feature_group_count",
        "lhs_dilation",
        "padding",
        "rhs_dilation",
        "window_strides",
    ),
    "convert_element_type": ("new_dtype", "sharding"),
    "cumsum": ("axis", "reverse"),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_linear_solve": ("const_lengths", "jaxprs"),
    "custom_vmap_call": ("call",),
    "custom_vjp_call": ("bwd", "call_jaxpr", "num_consts"),
    "dot_general": ("dimension_numbers", "out_sharding", "precision", "preferred_element_type"),
    "dot_product_attention_bwd_wrapper": ATTENTION,
    "dot_product_attention_fwd_wrapper": (*ATTENTION, "is_training"),
    "dynamic_slice": ("slice_sizes",),
    "fft": ("fft_lengths",),
    "gather": ("dimension_numbers", "fill_value", "mode", "slice_sizes"),
    "jit": ("jaxpr", "name"),
    "pad": ("padding_config",),
    "pallas_call": ("grid_mapping", "jaxpr"),
    "psum": ("axes",),
    "psum_invariant": ("axes",),
    "pure_callback": ("result_avals",),
    "ragged_dot_general": ("ragged_dot_dimension_numbers",),
    "reduce_precision": ("exponent_bits", "mantissa_bits"),
    "reduce_sum": ("axes",),
    "random_bits": ("bit_width",),
    "reduce_window_max": ("window_dimensions",),
    "remat2": ("differentiated", "jaxpr", "policy", "prevent_cse"),
    "reshape": ("dimensions", "new_sizes"),
    "rev": ("dimensions",),
    "scan": ("jaxpr", "length", "reverse", "unroll"),
    "scatter-add": ("dimension_numbers", "mode"),
    "shard_map": ("in_specs", "jaxpr", "out_specs"),
    "sharding_constraint": ("sharding",),
    "slice": ("limit_indices", "start_indices", "strides"),
    "sort": ("dimension", "num_keys"),
    "split": ("axis", "sizes"),
    "squeeze": ("dimensions",),
    "tile": ("reps",),
    "transpose": ("permutation",),
    "while": ("body_jaxpr", "body_nconsts", "cond_jaxpr", "cond_nconsts"),
}
"""The parameters that plurax reads of a primitive."""

TABLES = {
    "ELEMENTWISE": compat.ELEMENTWISE,
    "CHEAP": compat.CHEAP,
    "REDUCTIONS": compat.REDUCTIONS,
    "CUSTOM_PARTITIONED": compat.CUSTOM_PARTITIONED,
    "HOST_CALLS": compat.HOST_CALLS,
    "INLINED": compat.INLINED,
    "REMAT": compat.REMAT,
    "PARAMETERS": PARAMETERS,
    "RULES": RULES,
    "_HANDLERS": _HANDLERS,
}


def primitive_names():
    """Every primitive that a loaded module of JAX or plurax holds."""
    modules = [
        m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("jax", "plurax")
    ]
    return {
        value.name
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, Primitive)
    }


def unknown(names):
    """Those names that are no primitive of the installed JAX, and should be one."""
    return set(names) - primitive_names() - ABSENT


# --- Names and parameters in the code -------------------------------------------------------------


def is_primitive_name(node):
    return ast.unparse(node).endswith(".primitive.name")


def strings(node):
    constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def assigned(node):
    """The pairs of target and value of an assignment, `a, b = c, d` in two."""
    (target, *_), value = node.targets, node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def compared_names(tree, module):
    """The strings that a module compares with the name of an equation's primitive."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        # Variables that hold the name: `name = eqn.primitive.name`.
        assignments = [n for n in ast.walk(function) if isinstance(n, ast.Assign)]
        pairs = [pair for node in assignments for pair in assigned(node)]
        local = {target.id for target, value in pairs if is_primitive_name(value)}
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and (
                is_primitive_name(node.left)
                or (isinstance(node.left, ast.Name) and node.left.id in local)
            ):
                for other in node.comparators:
                    yield from strings(other)
                    for table in ast.walk(other):
                        if isinstance(table, ast.Name) and table.id.isupper():
                            yield from getattr(module, table.id)


def handled_names(tree):
    """The primitives for which a module gives the interpreter a handler."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("interpret", "evaluate"):
            for table in filter(lambda arg: isinstance(arg, ast.Dict), node.args):
                yield from strings(ast.Tuple([key for key in table.keys if key], ast.Load()))


def read_parameters(tree):
    """The parameters of equations that a module reads; those of an `Op` have names of our own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript) or ast.unparse(node.value) == "op.params":
            continue
        if ast.unparse(node.value).endswith("params"):
            yield from strings(node.slice) if isinstance(node.slice, ast.Constant) else ()


def reading_modules():
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "plurax.jaxpr" in text or ".primitive.name" in text:
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            yield path, ast.parse(text), importlib.import_module(".".join(parts))


@pytest.mark.parametrize("table", TABLES)
def test_every_name_in_a_table_is_a_primitive(table):
    assert unknown(TABLES[table]) == set()


def test_every_name_in_the_code_is_a_primitive():
    for path, tree, module in reading_modules():
        names = {*compared_names(tree, module), *handled_names(tree)}
        assert unknown(names) == set(), path


def test_every_parameter_in_the_code_is_in_the_table():
    # Of `annotate`, `order_after`, `at_experts`, `rows_apart` and `attend`.
    ours = {"tag", "batch", "transposed", "free_on_cpu", "function", "kernel"}
    ours |= {"dims", "result_dims", "devices"}
    known = {name for names in PARAMETERS.values() for name in names} | ours
    for path, tree, _ in reading_modules():
        assert set(read_parameters(tree)) <= known, path


def test_equations_in_place_of_a_call():
    doubled = jax.jit(lambda x: 2 * x, inline=compat.AS_EQUATIONS)
    assert [eqn.primitive.name for eqn in jax.make_jaxpr(doubled)(1.0).eqns] == ["mul"]


@pytest.mark.parametrize("fun", [
    lambda x: jnp.stack([x, 2 * x], 1), lambda x: jnp.unstack(x, axis=1), tuple,
    lambda x: jnp.tile(x, (2, 1, 3)),
    *[jax.vmap(lambda x, over=over: x - over(x, "rows"), axis_name="rows")
      for over in (jax.lax.pmean, jax.lax.pmax, jax.lax.pmin)],
])  # fmt: skip
def test_an_operation_that_is_a_few_others(fun):
    """What is evaluated in their place gives the same numbers."""
    spelled_out = {"stack", "unstack", "tile", "psum", "pmax", "pmin"}
    x = np.arange(24.0).reshape(2, 3, 4)
    closed = jax.make_jaxpr(fun)(x)
    by_others = interpret(closed.jaxpr, closed.consts, [x], inline=compat.is_call)
    assert all(map(np.array_equal, by_others, jax.tree.leaves(fun(x))))
    flat = flat_equations(closed.jaxpr.eqns, closed.jaxpr.outvars)
    assert {eqn.primitive.name for eqn in flat.eqns}.isdisjoint(spelled_out)


def test_the_names_of_one_version():
    assert ABSENT.isdisjoint(primitive_names())
    names = {name for table in TABLES.values() for name in table}
    assert names >= compat.ONLY_OLDER | compat.ONLY_NEWER


# --- Parameters of traced equations ---------------------------------------------------------------


def two_devices():
    return jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2])


def by_hand(body):
    """`body` under `shard_map` over two devices, as a model calls it."""
    return lambda x: jax.shard_map(body, mesh=two_devices(), in_specs=P("a"), out_specs=P())(x)


@jax.custom_jvp
def jvp(x):
    return x


@jax.custom_vjp
def vjp(x):
    return x


@jax.custom_batching.custom_vmap
def batched(x):
    return x


batched.def_vmap(lambda size, in_batched, x: (x, in_batched[0]))
jvp.defjvp(lambda primals, tangents: (*primals, *tangents))
vjp.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent,))


def attention(x):
    """cuDNN's, traced as where there is one."""
    x = jnp.tile(x, (2, 2)).astype(jnp.bfloat16)[None, :, None]
    with mock.patch.object(fused_attention, "check_cudnn_version", return_value=91000):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")


def copied(x_ref, out_ref):
    out_ref[...] = x_ref[...]


EXAMPLES = {
    "all_gather_invariant": by_hand(lambda x: lax.all_gather(x, "a", to="invarying")),
    "argmax": jnp.argmax,
    "bcoo_dot_general": lambda x: BCOO.fromdense(x, nse=16) @ x,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 4, 4)),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "conv_general_dilated": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "custom_jvp_call": jvp,
    "custom_linear_solve": lambda x: lax.custom_linear_solve(
        lambda v: x @ v, x[0], lambda _, b: b, lambda _, b: b
    ),
    "custom_vmap_call": batched,
    "custom_vjp_call": vjp,
    "dot_general": lambda x: x @ x,
    "dot_product_attention_bwd_wrapper": jax.grad(lambda x: attention(x).sum()),
    "dot_product_attention_fwd_wrapper": lambda x: attention(x),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, jnp.argmax(x[0])), (1, 1)),
    "fft": jnp.fft.fft,
    "gather": lambda x: x[jnp.argmax(x, 0)],
    "jit": jax.jit(jnp.sin),
    "pad": lambda x: jnp.pad(x, 1),
    "pallas_call": pl.pallas_call(copied, out_shape=jax.ShapeDtypeStruct((4, 4), jnp.float32)),
    "psum": jax.vmap(lambda x: lax.psum(x, "a"), axis_name="a"),
    "psum_invariant": by_hand(lambda x: lax.psum(x, "a")),
    "pure_callback": lambda x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    ),
    "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.array([4])),
    "random_bits": lambda x: jax.random.bits(jax.random.key(0), x.shape),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "reduce_sum": jnp.sum,
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID"),
    "remat2": jax.checkpoint(jnp.sin),
    "reshape": lambda x: x.reshape(-1),
    "rev": lambda x: x[::-1],
    "scan": lambda x: lax.scan(lambda carry, row: (carry + row, row), x[0], x),
    "scatter-add": lambda x: x.at[jnp.argmax(x, 0)].add(1.0),
    "shard_map": by_hand(lambda x: lax.psum(x, "a")),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(two_devices(), P())
    ),
    "slice": lambda x: x[1:],
    "sort": lambda x: jnp.sort(x, 0),
    "split": lambda x: jax.lax.split(x, (1, 3)),
    "squeeze": lambda x: jnp.squeeze(x[:1], 0),
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "transpose": jnp.transpose,
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_equation_has_the_parameters_that_are_read(name):
    jaxpr = jax.make_jaxpr(EXAMPLES[name])(jnp.ones((4, 4))).jaxpr
    found = [eqn for eqn in all_equations(jaxpr) if eqn.primitive.name == name]
    assert found, jaxpr
    for eqn in found:
        assert set(PARAMETERS[name]) <= set(eqn.params)


# --- The interpreter ------------------------------------------------------------------------------


def model(x):
    with jax.named_scope("body"):
        y = jax.jit(jnp.sin)(x) * 2.0
    return lax.scan(lambda carry, row: (carry + row, carry), y[0], y)


def evaluated(fun, x, *args, **options):
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(x)
    out = interpret(closed.jaxpr, closed.consts, [x], *args, **options)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


X = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("inline", [None, is_call])
def test_interpreting_is_calling(inline):
    got, expected = evaluated(model, X, inline=inline), model(X)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_handler_takes_its_primitive_in_calls_too():
    halved = {"sin": lambda eqn, inputs: [inputs[0] / 2]}
    got = evaluated(lambda x: jax.jit(jnp.sin)(x) + 1, X, halved, inline=is_call)
    np.testing.assert_allclose(got, X / 2 + 1)
    np.testing.assert_allclose(evaluated(jax.jit(jnp.sin), X, halved), np.sin(X), rtol=1e-6)


def test_values_need_not_be_arrays():
    either = {"default": lambda eqn, inputs: [any(inputs)] * len(eqn.outvars)}
    closed = jax.make_jaxpr(lambda x, y: (x * 2 + np.arange(3.0), jnp.sin(y), 1.0))(1.0, 2.0)
    consts = [False] * len(closed.consts)
    found = interpret(
        closed.jaxpr, consts, [True, False], **either, inline=is_call, lift=lambda _: False
    )
    assert found == [True, False, False]


def test_the_scopes_of_a_call_are_named_once():
    def inner(x):
        return jnp.sin(x)

    for inline in (None, is_call):
        run = jax.jit(partial(evaluated, lambda x: jax.jit(inner)(x), inline=inline))
        text = run.lower(X).as_text(debug_info=True)
        assert "jit(inner)" in text
        assert "jit(inner)/jit(inner)" not in text


def test_a_sharding_constraint_is_kept():
    fun = partial(evaluated, EXAMPLES["sharding_constraint"])
    (eqn,) = jax.make_jaxpr(fun)(X).eqns
    assert eqn.params["sharding"].spec == P()


def test_a_value_is_dropped_after_its_last_reader():
    alive = []

    class Value:
        def __del__(self):
            alive.remove(id(self))

        def __init__(self):
            alive.append(id(self))

    most = 0

    def handler(eqn, inputs):
        nonlocal most
        most = max(most, len(alive))
        return [Value()]

    closed = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.sin(jnp.cos(x)))))(1.0)
    interpret(closed.jaxpr, closed.consts, [Value()], default=handler)
    assert most <= 2


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_taken_apart(reverse):
    def fun(w, x):
        def body(carry, row):
            y, last = row
            return (carry[0] * w + y.sum(), carry[1] * 1.5), (y - carry[1], last)

        return lax.scan(body, (jnp.ones(3), 2.0), (x, x[:, 0]), reverse=reverse)

    closed = jax.make_jaxpr(fun)(X[0], X)
    eqn = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    scan = Scan.of(eqn)
    assert (scan.num_consts, scan.num_carry, scan.length) == (1, 2, 4)
    assert scan.reverse == reverse

    def again(eqn, inputs):
        consts, carry, xs = scan.split(inputs)

        def body(carry, row):
            return interpret(scan.body, scan.body_consts, [*consts, *carry, *row])

        return scan.run(body, carry, xs)

    out = interpret(closed.jaxpr, closed.consts, [X[0], X], {"scan": again})
    expected = jax.tree.leaves(fun(X[0], X))
    jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.psum(x, "a"),
        lambda x: lax.all_gather(x, "a", axis=1, to="invarying"),
        lambda x: lax.all_gather(x, "a", axis=1, tiled=True, to="invarying"),
    ],
    ids=["psum", "all_gather", "all_gather tiled"],
)
def test_collectives_by_hand(collective):
    """Those traced under `check_vma` are replaced by the ordinary ones."""
    eqn = jax.make_jaxpr(by_hand(collective))(X).eqns[0]
    body, consts = compat.open_jaxpr(eqn.params["jaxpr"])

    def local(x):
        return eval_manual_body(body, consts, [x])[0]

    options = {"mesh": two_devices(), "in_specs": P("a"), "out_specs": P(), "check_vma": False}
    got, expected = (jax.jit(jax.shard_map(fun, **options))(X) for fun in (local, collective))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("call", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_stacked_parameters_are_found_in_calls(call):
    def loss(params, x):
        stack = params["stack"].astype(jnp.bfloat16)
        return call(lambda s, x: lax.scan(lambda h, w: (h * w, None), x, s)[0])(stack, x)

    params = {"other": jnp.ones((3, 4)), "stack": jnp.ones((3, 4))}
    closed = jax.make_jaxpr(loss)(params, jnp.ones(4, jnp.bfloat16))
    assert stacks(closed.jaxpr, params) == [False, True]
