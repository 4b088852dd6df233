"""Flatten jaxprs into blocks: operations on values, loops and branches nested.

Tracing a step gives jaxprs in which calls are nested and a `jax.shard_map` separates whole arrays
from shards. An estimate needs less: what a device computes, in order, and how large it is.

    jaxpr                                    flat
    shard_map[ jit[f] x  reshape  ... ]      the operations inside, on values of one shard's size
    y = reshape x                            nothing: y is the value x
    c, ys = scan[body] w c xs                one `Op` with a `Block`: the body, which begins with
                                             `row` operations (xs[i]) and ends with `stack` ones
                                             (ys[i] = y)
    y = psum[axes=(data,)] x                 the same operation; of an axis of one device, nothing
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from jax.extend.core import Literal

from plurax.jaxpr.attention_kernels import ATTENTION, attention_products
from plurax.jaxpr.compat import (
    ELEMENTWISE,
    Scan,
    call_operands,
    called_jaxpr,
    inner_jaxprs,
    is_call_or_remat,
    open_jaxpr,
)
from plurax.jaxpr.pallas import pallas_products
from plurax.jaxpr.product_dims import product_dims
from plurax.partition.scopes import IF_UNEVEN
from plurax.trace.step_trace import COLLECTIVES, Block, Op, Value


@final
class Flattener:
    """Turns jaxprs into blocks, for a mesh of these `sizes`."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        # The name scopes of the calls and loops that enclose the equation.
        self._scopes = ""
        # Of a stack that an unrolled loop wrote: its rows, which a later one reads instead.
        self.pieces: dict[Value | None, list[Value | None]] = {}
        # Of a product's result: the transposition that swapping its operands makes free.
        self.products: dict[Value | None, tuple[int, ...]] = {}

    def block(self, jaxpr: Any, args: Sequence[Value | None]) -> Block:
        """Return the block of a jaxpr on these arguments; None for a literal."""
        ops: list[Op] = []
        outputs = self.inline(jaxpr, args, ops)
        return Block(ops, [one for one in args if one is not None], outputs)

    def inline(self, jaxpr: Any, args: Sequence[Value | None], ops: list[Op]) -> list[Value | None]:
        """Append a jaxpr's operations to `ops`, and return the values of its results."""
        values: dict[Any, Value | None] = {var: Value(var.aval) for var in jaxpr.constvars}
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value | None:
            return None if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            outer = self._scopes
            if inner_jaxprs(eqn):
                self._scopes = f"{outer}/{eqn.source_info.name_stack}"
            values.update(zip(eqn.outvars, self._outputs(eqn, inputs, ops), strict=True))
            self._scopes = outer
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(
        self, eqn: Any, inputs: list[Value | None], ops: list[Op]
    ) -> Sequence[Value | None]:
        name, params = eqn.primitive.name, eqn.params
        if is_call_or_remat(eqn):
            return self.inline(called_jaxpr(eqn)[0], call_operands(eqn, inputs), ops)
        if name == "shard_map":
            return self.inline(inner_jaxprs(eqn)[0], inputs, ops)
        if self._is_view(eqn, name, params):
            return inputs[: len(eqn.outvars)]
        if name == "scan":
            return self._scan(eqn, inputs, ops)
        outputs = [Value(var.aval) for var in eqn.outvars]
        if name == "random_bits":
            # Threefry computes two words for each number, in a loop, and returns their xor.
            words = [Value(eqn.outvars[0].aval), Value(eqn.outvars[0].aval)]
            ops.append(Op("random_bits", params, [one for one in inputs if one], words))
            ops.append(Op("xor", {}, words, outputs))
            return outputs
        if name == "dot_general":
            inputs = self._canonical(eqn, inputs, ops)
            self.products[outputs[0]] = _swapped(eqn)
            left, right = (var.aval for var in eqn.invars)
            dims = product_dims(eqn, (left.shape, right.shape), eqn.outvars[0].aval.shape)
            precision = str(params["precision"])
            params = {"product": dims, "dtype": str(left.dtype), "precision": precision}
        elif name == "ragged_dot_general":
            shapes = [var.aval.shape for var in eqn.invars]
            dims = product_dims(eqn, shapes, eqn.outvars[0].aval.shape)
            groups = params["ragged_dot_dimension_numbers"].rhs_group_dimensions
            params = {"product": dims, "dtype": str(eqn.invars[0].aval.dtype), "rows": bool(groups)}
        elif name == "conv_general_dilated":
            left, right = (var.aval for var in eqn.invars)
            params = {**params, "kernel": right.shape, "dtype": str(left.dtype)}
        elif name in ATTENTION:
            count, dims = attention_products(eqn, [var.aval.shape for var in eqn.invars])
            params = {"product": dims, "count": count, "dtype": str(eqn.invars[0].aval.dtype)}
        elif name == "pallas_call" and (kernel := pallas_products(eqn)) is not None:
            params = dict(zip(("count", "product", "dtype"), kernel, strict=True))
        elif name in COLLECTIVES:
            params = {**params, "scopes": f"{self._scopes}/{eqn.source_info.name_stack}"}
        elif name == "transpose" and params["permutation"] == self.products.get(inputs[0]):
            return inputs  # the product of swapped operands
        operands = [one for one in inputs if one is not None]
        blocks: list[Block] = []
        trips: int | None = 1
        if name == "while":
            expected = 0 if IF_UNEVEN in self._scopes else None
            blocks, trips = [self._while_body(eqn, inputs, ops)], expected
            operands += blocks[0].inputs[: -len(outputs)]
            params = {"carry": inputs[-len(outputs) :], "condition": self._condition(eqn, inputs)}
        elif name == "cond":
            blocks = [self.block(open_jaxpr(b)[0], inputs[1:]) for b in params["branches"]]
        ops.append(Op(name, params, operands, outputs, blocks, trips))
        return outputs

    def _is_view(self, eqn: Any, name: str, params: Mapping[str, Any]) -> bool:
        """Whether the outputs are the inputs, in other words or shapes."""
        if name == "order_after":
            return all(params["free_on_cpu"])
        if name in VIEWS or not eqn.outvars:  # `jax.debug.print`, a branch that only prints
            return True
        if name in COLLECTIVES:
            return group_size(params, self.sizes) == 1 and not params.get("perm")
        if len(eqn.invars) != 1 or isinstance(eqn.invars[0], Literal):
            return False
        before, after = eqn.invars[0].aval, eqn.outvars[0].aval
        if name == "convert_element_type":
            return before.dtype == after.dtype
        if name == "broadcast_in_dim":
            return math.prod(before.shape) == math.prod(after.shape)
        if name == "transpose":
            order = params["permutation"]
            kept = [dim for dim in order if before.shape[dim] > 1]
            return kept == sorted(kept)
        return False

    def _canonical(self, eqn: Any, inputs: list[Value | None], ops: list[Op]) -> list[Value | None]:
        """Transpose the operands of a product to what XLA multiplies.

        That is `(*batch, rows, summed)` by `(*batch, summed, columns)`, each of the last two one
        dim of memory. An operand of two dims is multiplied as it is. An `operand` operation does
        the transposing.
        """
        contracting, batch = eqn.params["dimension_numbers"]
        operands: list[Value | None] = []
        for index, value in enumerate(inputs):
            summed, shared, aval = contracting[index], batch[index], eqn.invars[index].aval
            if value is None or (aval.ndim == len(shared) + 2 and is_leading(shared)):
                operands.append(value)
                continue
            free = [d for d in range(aval.ndim) if d not in (*summed, *shared)]
            order = [*shared, *free, *summed] if index == 0 else [*shared, *summed, *free]
            kept = [dim for dim in order if aval.shape[dim] > 1]
            if kept != sorted(kept):
                moved = Value(aval, order)
                ops.append(Op("operand", {}, [value], [moved]))
                value = moved
            operands.append(value)
        return operands

    def _scan(self, eqn: Any, inputs: list[Value | None], ops: list[Op]) -> list[Value]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(inputs)
        if scan.unroll >= scan.length:
            return self._unrolled(scan, consts, carry, xs, eqn, ops)
        inside = scan.body.invars[scan.num_consts :]
        starts = [Value(var.aval) for var in inside[: scan.num_carry]]
        rows = [Value(var.aval) for var in inside[scan.num_carry :]]
        body = [
            Op("row", {}, [] if stack is None else [stack], [row])
            for stack, row in zip(xs, rows, strict=True)
        ]
        results = self.inline(scan.body, [*consts, *starts, *rows], body)
        ops += (hoisted := hoist(body, consts))
        ends = results[: scan.num_carry]
        outputs = [Value(var.aval) for var in eqn.outvars]
        for y, stack in zip(results[scan.num_carry :], outputs[scan.num_carry :], strict=True):
            body.append(Op("stack", {}, [] if y is None else [y], [stack]))
        carried = list(zip(starts, ends, strict=True))
        early = [value for op in hoisted for value in op.outputs]
        given = [one for one in (*consts, *xs, *early) if one is not None]
        block = Block(body, [*given, *starts], ends, carried)
        begins = [one for one in carry if one is not None]
        ops.append(Op("scan", {"carry": carry}, [*given, *begins], outputs, [block], scan.length))
        return outputs

    def _unrolled(
        self, scan: Scan, consts: Any, carry: Any, xs: Any, eqn: Any, ops: list[Op]
    ) -> list[Value]:
        """Append the iterations of a loop that is written out, one after another."""
        rows_of = scan.body.invars[scan.num_consts + scan.num_carry :]
        stacks = [Value(var.aval) for var in eqn.outvars[scan.num_carry :]]
        pieces: list[list[Value | None]] = [[None] * scan.length for _ in stacks]
        order = range(scan.length)
        for index in reversed(order) if scan.reverse else order:
            rows = []
            for stack, var in zip(xs, rows_of, strict=True):
                row = self.pieces[stack][index] if stack in self.pieces else None
                if row is None:
                    row = Value(var.aval)
                    ops.append(Op("slice", {}, [] if stack is None else [stack], [row]))
                rows.append(row)
            results = self.inline(scan.body, [*consts, *carry, *rows], ops)
            carry = results[: scan.num_carry]
            for own, piece in zip(pieces, results[scan.num_carry :], strict=True):
                own[index] = piece
        for stack, own in zip(stacks, pieces, strict=True):
            ops.append(Op("concatenate", {}, [p for p in own if p is not None], [stack]))
            self.pieces[stack] = own
        return [*carry, *stacks]

    def _condition(self, eqn: Any, inputs: list[Value | None]) -> Block:
        """Return the condition of a loop; its collectives aside, no reader counts it."""
        jaxpr, skip = open_jaxpr(eqn.params["cond_jaxpr"])[0], eqn.params["cond_nconsts"]
        starts = [Value(var.aval) for var in jaxpr.invars[skip:]]
        return self.block(jaxpr, [*inputs[:skip], *starts])

    def _while_body(self, eqn: Any, inputs: list[Value | None], ops: list[Op]) -> Block:
        skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        jaxpr = open_jaxpr(eqn.params["body_jaxpr"])[0]
        starts = [Value(var.aval) for var in jaxpr.invars[consts:]]
        constants = inputs[skip : skip + consts]
        body: list[Op] = []
        ends = self.inline(jaxpr, [*constants, *starts], body)
        ops += (hoisted := hoist(body, constants))
        read = [*constants, *(value for op in hoisted for value in op.outputs), *starts]
        carried = list(zip(starts, ends, strict=True))
        return Block(body, [one for one in read if one is not None], ends, carried)


KEPT = frozenset(["broadcast_in_dim", "iota", "operand", "rev", "slice", "transpose"])
"""Operations that XLA leaves in a loop even if they are the same in every iteration."""

HOISTED = (ELEMENTWISE | {"concatenate", "pad"}) - KEPT
"""Operations that it takes out of a loop then."""


def is_leading(dims: Sequence[int]) -> bool:
    """Whether dims are the first ones, in order."""
    return list(dims) == list(range(len(dims)))


def _swapped(eqn: Any) -> tuple[int, ...]:
    """Return the transposition of a product's result that swaps what its operands contribute."""
    (left, _), (batch, _) = eqn.params["dimension_numbers"]
    shared, rank = len(batch), len(eqn.outvars[0].aval.shape)
    rows = len(eqn.invars[0].aval.shape) - len(left) - shared
    return (*range(shared), *range(shared + rows, rank), *range(shared, shared + rows))


def hoist(body: list[Op], consts: Sequence[Value | None]) -> list[Op]:
    """Take out of a loop's body what is the same in every iteration, and return it.

    XLA computes that once, before the loop: the concatenation of a bucket of parameters, their
    casts. A broadcast or a slice stays, and is copied where something that is taken out reads it.
    Where one platform's compiler takes out more, its `CompilerRules` say so (`hoists_masks`).

    Source: XLA's `while_loop_invariant_code_motion.cc`, and programs compiled for CPUs and TPUs. A
    GPU's compiler may fuse such an operation into a product in the loop, and compute it again.
    """
    known = {value for value in consts if value is not None}
    cheap: dict[Value, Op] = {}
    hoisted: dict[Op, None] = {}

    def take(op: Op) -> None:
        for value in op.inputs:
            if value in cheap:
                take(cheap[value])
        hoisted[op] = None

    for op in body:
        if op.blocks or not all(value in known for value in op.inputs):
            continue
        if op.name in KEPT:
            cheap.update(dict.fromkeys(op.outputs, op))
        elif op.name in HOISTED and op.inputs:
            take(op)
        else:
            continue
        known.update(op.outputs)
    body[:] = [op for op in body if op not in hoisted or op.name in KEPT]
    return list(hoisted)


def group_size(params: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return how many devices communicate in a collective's group."""
    groups = params.get("axis_index_groups")
    if groups:
        return len(groups[0])
    return math.prod(sizes.get(name, 1) for name in axis_names(params))


def group_along_axis(params: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the devices of a group and how far apart they are, where a collective runs in groups
    along an axis, or rings; None where it does not.

    >>> group_along_axis({"axis_index_groups": [[0, 2], [1, 3]]})
    (2, 2)
    >>> group_along_axis({"perm": [(0, 2), (1, 3), (2, 0), (3, 1)]})
    (2, 2)
    """
    if groups := params.get("axis_index_groups"):
        first, *rest = groups[0]
        return len(groups[0]), rest[0] - first if rest else 1
    steps = {there - here for here, there in params.get("perm") or ()}
    if len(steps) == 2 and min(steps) < 0 < max(steps) and min(steps) % max(steps) == 0:
        return 1 - min(steps) // max(steps), max(steps)
    return None


def axis_names(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes that a collective runs over."""
    names = params.get("axes") or params.get("axis_name") or ()
    return tuple(names) if isinstance(names, tuple | list) else (names,)


VIEWS = frozenset([
    "annotate", "copy", "copy_p", "expand_dims", "name", "optimization_barrier", "pcast", "pvary",
    "random_unwrap", "random_wrap", "reshape", "reshard", "sharding_constraint",
    "squeeze", "stop_gradient",
])  # fmt: skip
"""Operations whose result is their operand's memory."""
