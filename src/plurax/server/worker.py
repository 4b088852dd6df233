"""A worker: computes gradients of the parameters that it is given.

It has the devices of its plan, and no state but what a compression has left to send.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from plurax.execute.program import Program
from plurax.execute.program_cache import cached_program, shapes_key
from plurax.execute.step import Gradients
from plurax.mesh import make_mesh
from plurax.server.compression import Residuals, encode, first_residuals, get_codec
from plurax.server.messages import Header, Pulled, Ticket
from plurax.server.residuals import Leaves, from_leaves, to_leaves
from plurax.server.run_spec import RunSpec
from plurax.server.shard_layout import all_finite, from_bytes, from_host, to_host
from plurax.server.sharded_update import Numbers
from plurax.state import TrainState


class Worker:
    """Computes gradients.

    **Arguments:** `spec`; `index`; `life`, how often it was restarted; `key`, the data of the
    run's random key; `residuals`, what its compression has left to send, an array like each
    parameter, or None; `devices`, by default all that JAX sees.
    """

    def __init__(
        self,
        spec: RunSpec,
        index: int,
        life: int,
        key: np.ndarray,
        residuals: Leaves | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.spec, self.index, self.life = spec, index, life
        self._shards = range(spec.servers.shards)
        self.program = _gradient_program(spec, devices)
        self.state = self.program.canonical_shapes
        self._key = from_host(key, spec.state.key)
        self._skipped = jnp.zeros_like(self.state.skipped)
        self._codec = get_codec(spec.servers.compression)
        self._residuals: list[Residuals] = [
            first_residuals(self._codec, spec.layout.lengths(shard)) for shard in self._shards
        ]
        if residuals is not None:
            self._residuals = from_leaves(spec.layout, residuals)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state.params)
        self._finite = spec.jitted("finite", lambda: all_finite)
        # In `sync` the servers compute them, of the sum over workers.
        sends = spec.servers.mode != "sync" and spec.update.crossings > 0
        start = spec.update.grads.start

        def numbers(grads: dict[int, Array], scalars: dict[int, Array]) -> Numbers:
            leaves = {start + index: leaf for index, leaf in grads.items()}
            return spec.update.worker_numbers({**leaves, **scalars})

        self._numbers = spec.jitted("numbers", lambda: numbers) if sends else None

    def gradients(self, ticket: Ticket, sequence: int, *pulled: Pulled) -> tuple[Any, ...]:
        """Return a header, and for each shard what is pushed to it.

        **Arguments:** `ticket`; `sequence`, the number of the push; `pulled`, from each shard.
        """
        return self._push(ticket, sequence, pulled, self.program.gradients)

    def prepare(self) -> None:
        """Compile all that `gradients` runs; the task's functions see no numbers.

        A worker that has answered this holds nobody up: it is as fast in its first gradient as
        later.
        """
        model_state = self.spec.update.model_state
        pulled = [
            Pulled(
                incarnation=0,
                version=0,
                vectors=tuple(
                    np.zeros(length * jnp.dtype(dtype).itemsize, np.uint8)
                    for dtype, length in self.spec.layout.lengths(shard)
                ),
                model_state={index: _zeros(self.spec.leaves[index]) for index in model_state},
            )
            for shard in self._shards
        ]
        batch = jax.tree.map(_zeros, self.spec.batch)
        ticket = Ticket(step=0, part=0, parts=self.spec.servers.parts, first=0, batch=batch)
        residuals = list(self._residuals)
        self._push(ticket, 0, pulled, self._compiled)
        self._residuals = residuals

    def _compiled(self, state: TrainState, batch: PyTree, *, first: int | None) -> Gradients:
        """Compile the program's `gradients`, and return zeros like what it returns."""
        gradients, arguments = self.program.gradients_call(state, batch, first)
        lowered = gradients.lower(*arguments)
        shardings = lowered.compile().output_shardings
        zeros: Gradients = jax.tree.map(lambda x: from_host(_zeros(x), x), lowered.out_info)
        return jax.device_put(zeros, shardings)

    def _push(
        self,
        ticket: Ticket,
        sequence: int,
        pulled: Sequence[Pulled],
        compute: Callable[..., Gradients],
    ) -> tuple[Any, ...]:
        sums = self._sums(ticket, pulled, compute)
        grads = dict(enumerate(jax.tree.leaves(sums.grads)))
        leaves = jax.tree.leaves(sums._replace(grads=()))
        scalars = dict(zip(self.spec.update.scalars, leaves, strict=True))
        layout = self.spec.layout
        vectors = [layout.join(shard, layout.pieces(shard, grads)) for shard in self._shards]
        encoded = [
            encode(self._codec, *both) for both in zip(vectors, self._residuals, strict=True)
        ]
        content = [parts for parts, _ in encoded]
        self._residuals = [residuals for _, residuals in encoded]
        numbers = {} if self._numbers is None else self._numbers(grads, scalars)
        header = Header(
            worker=self.index,
            life=self.life,
            sequence=sequence,
            step=ticket.step,
            part=ticket.part,
            bases=tuple((shard.incarnation, shard.version) for shard in pulled),
            layout=self.spec.layout_name,
            finite=self._are_finite(grads, numbers),
            scalars={index: to_host(leaf) for index, leaf in scalars.items()},
            numbers={index: np.asarray(number) for index, number in numbers.items()},
            sent=sum(array.nbytes for parts in content for arrays in parts for array in arrays),
        )
        return header, *content

    def _are_finite(self, grads: dict[int, Array], numbers: dict[int, Array]) -> bool:
        """Return whether all gradients are finite.

        Among the numbers are sums of squares of all gradients but those that every shard has (the
        metric `grad_norm`). Where they are finite, so is what they are of.
        """
        if numbers and all(np.isfinite(number).all() for number in numbers.values()):
            homes = self.spec.layout.homes
            grads = {index: grad for index, grad in grads.items() if homes[index] is None}
        return bool(self._finite(list(grads.values())))

    def _params(self, pulled: Sequence[Pulled]) -> PyTree:
        """Return the parameters on this worker's devices; on CPU what was pulled is not copied."""
        layout, parts = self.spec.layout, list[dict[int, Any]]()
        for shard, of_shard in enumerate(pulled):
            vectors = [
                from_bytes(content, dtype)
                for content, (dtype, _) in zip(of_shard.vectors, layout.lengths(shard), strict=True)
            ]
            parts.append(layout.split(shard, vectors))
        leaves = layout.whole(parts)
        structure = jax.tree.structure(self.spec.state.params)
        params = jax.tree.unflatten(structure, [leaves[index] for index in range(len(leaves))])
        return jax.device_put(params, self._shardings)

    def residuals(self) -> Leaves:
        """Return for each parameter what a compression with feedback has left to send."""
        return to_leaves(self.spec.layout, self._residuals)

    def _sums(
        self, ticket: Ticket, pulled: Sequence[Pulled], compute: Callable[..., Gradients]
    ) -> Gradients:
        batch = ticket.batch
        if ticket.rows is not None:
            batch = jax.tree.map(lambda leaf: np.asarray(leaf)[ticket.rows], self.spec.arrays)
        like = self.spec.leaves
        model_state = [
            from_host(leaf, like[index]) for index, leaf in pulled[0].model_state.items()
        ]
        state = TrainState(
            step=jnp.asarray(ticket.step, self.state.step.dtype),
            params=self._params(pulled),
            opt_state=self.state.opt_state,  # empty
            model_state=jax.tree.unflatten(
                jax.tree.structure(self.spec.state.model_state), model_state
            ),
            key=self._key,
            skipped=self._skipped,
        )
        first = None if ticket.parts == 1 else ticket.first
        state = self.program.from_canonical(state)
        sums = compute(state, batch, first=first)
        # They have the form that the program stores parameters in; servers have them whole.
        whole = dataclasses.replace(state, params=sums.grads)
        return sums._replace(grads=self.program.to_canonical(whole).params)


def _gradient_program(spec: RunSpec, devices: Sequence[jax.Device] | None) -> Program:
    mesh = make_mesh(spec.plan, devices)
    # Without an optimizer: its state is with the servers.
    key = ("worker", spec.plan, shapes_key(spec.batch), tuple(mesh.devices.flat), spec.options)
    parts = (spec.task, optax.identity(), spec.plan, spec.batch, mesh)
    return cached_program(
        spec.task, key, lambda: Program(*parts, compiler_options=dict(spec.options))
    )


def _zeros(like: Any) -> np.ndarray:
    """Return zeros like a leaf; like the data of a random key."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        like = jax.eval_shape(jax.random.key_data, like)
    return np.zeros(like.shape, like.dtype)
