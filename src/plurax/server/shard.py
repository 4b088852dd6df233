"""A parameter server: some parameters, their optimizer's state, and the updates they have had.

A shard is called by one caller at a time, so every pull is of one version and every update is
applied once. It refuses what it has had, what comes from the past, and what is damaged; then it
changes nothing but a count. Two ways of updating:

    ApplyingShard     `bounded`, `async`: a push is an update
    SummingShard      `sync`: pushes of a step wait; `commit` adds them up, in the order of the
                      parts of the batch, whoever computed them, and updates once
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from plurax.server.compression import decode, get_codec
from plurax.server.corrections import delay, scale
from plurax.server.messages import Content, Header, Pulled, Reason, Reply, Snapshot
from plurax.server.run_spec import RunSpec
from plurax.server.servers import IN_PROCESS
from plurax.server.shard_layout import Vectors, all_finite, from_host, to_bytes, to_host
from plurax.state import TrainState


class Shard(abc.ABC):
    """One server's part of the state.

    **Arguments:** `spec`; `index`, of the shard; `incarnation`, how often it was restarted;
    `snapshot`, what it begins with.
    """

    def __init__(self, spec: RunSpec, index: int, incarnation: int, snapshot: Snapshot) -> None:
        self.spec, self.index = spec, index
        self.update = spec.update
        self.lengths = spec.layout.lengths(index)
        self.restore(incarnation, snapshot)
        self._params = [i for i in spec.update.params if i in self.leaves]
        self._finite = spec.jitted("finite", lambda: all_finite)

    def restore(self, incarnation: int, snapshot: Snapshot) -> None:
        """Begin again from a snapshot."""
        self.incarnation, self.version = incarnation, snapshot.version
        like = self.spec.leaves
        self.leaves = {i: from_host(leaf, like[i]) for i, leaf in snapshot.leaves.items()}
        self.seen = dict(snapshot.seen)
        self._forget()

    @abc.abstractmethod
    def _forget(self) -> None:
        """Drop what was kept for pushes to come: they are of other parameters."""

    def snapshot(self) -> tuple[int, Snapshot]:
        """Return the version, and all that the shard can be restarted from."""
        leaves = {index: to_host(leaf) for index, leaf in self.leaves.items()}
        return self.version, Snapshot(self.version, leaves, dict(self.seen))

    def pull(self, worker: int, sequence: int) -> tuple[int, Pulled]:
        """Return the version and the parameters, for the push `sequence` of a worker."""
        first = self.update.params.start
        held = {index - first: self.leaves[index] for index in self._params}
        content = tuple(map(to_bytes, self.spec.layout.join(self.index, held)))
        if self.spec.servers.transport in IN_PROCESS:
            # Who shares our memory would see the next update in it.
            content = tuple(part.copy() for part in content)
        model_state = {i: to_host(self.leaves[i]) for i in self.update.model_state}
        self._keep_pulled(worker, sequence)
        return self.version, Pulled(self.incarnation, self.version, content, model_state)

    @abc.abstractmethod
    def _keep_pulled(self, worker: int, sequence: int) -> None:
        """Keep of the parameters what the push of their gradient needs."""

    @abc.abstractmethod
    def push(self, header: Header, content: Content) -> Reply:
        """Take or refuse a gradient."""

    def _refused(self, header: Header, vectors: Vectors | None) -> Reason | None:
        """Return why a push is refused, or None."""
        if len(header.bases) != self.spec.servers.shards:
            return "damaged"
        incarnation, base = header.bases[self.index]
        life, last = self.seen.get(header.worker, (0, -1))
        if incarnation != self.incarnation:
            return "server restarted"
        if header.life < life:
            return "worker restarted"
        if (header.life, header.sequence) <= (life, last):
            return "duplicate"
        if header.layout != self.spec.layout_name or vectors is None:
            return "wrong layout"
        scalars = {i: self.spec.leaves[i] for i in self.update.scalars}
        if base > self.version or header.scalars.keys() != scalars.keys() or any(
            np.shape(header.scalars[i]) != like.shape or header.scalars[i].dtype != like.dtype
            for i, like in scalars.items()
            if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
        ):  # fmt: skip
            return "damaged"
        if header.finite and not self._finite(vectors):
            return "not finite"
        return None

    def _vectors(self, content: Content) -> Vectors | None:
        """Return the vectors of a push, or None where they are not those of this shard."""
        return decode(get_codec(self.spec.servers.compression), content, self.lengths)

    def _scalars(self, header: Header) -> dict[int, Array]:
        """Return the sums of a push but its gradients, by the index of their leaf."""
        return {i: from_host(leaf, self.spec.leaves[i]) for i, leaf in header.scalars.items()}

    def _grads(self, vectors: Vectors) -> dict[int, Array]:
        """Return gradients by the index of their leaf."""
        first = self.update.grads.start
        split = self.spec.layout.split(self.index, vectors)
        return {first + index: leaf for index, leaf in split.items()}


class ApplyingShard(Shard):
    """A shard that updates with every push, however old the parameters are that it is of."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The parameters that a gradient is of are needed once more.
        keep = self.spec.servers.correction == "delay"
        self._apply = self.spec.jitted(
            f"apply {self.index}", lambda: self._updated, donate_argnums=() if keep else 0
        )

    def _forget(self) -> None:
        self._pulled: dict[tuple[int, int], dict[int, Array]] = {}

    def _keep_pulled(self, worker: int, sequence: int) -> None:
        if self.spec.servers.correction == "delay":
            # A worker has two pushes to come at most; of one that never comes nothing stays.
            self._pulled = {at: params for at, params in self._pulled.items()
                            if at[0] != worker or at[1] > sequence - 2}  # fmt: skip
            self._pulled[worker, sequence] = {i: self.leaves[i] for i in self._params}

    def push(self, header: Header, content: Content) -> Reply:
        """Update with a gradient, or refuse it."""
        vectors = self._vectors(content)
        reason = self._refused(header, vectors)
        if reason is not None:
            return Reply(reason, self.version)
        staleness = self.version - header.bases[self.index][1]
        bound = self.spec.servers.max_staleness
        if bound is not None and staleness > bound:
            return Reply("too stale", self.version, staleness)
        base = self._pulled.pop((header.worker, header.sequence), {})
        self.leaves, metrics = self._apply(
            self.leaves, vectors, self._scalars(header), header.numbers, base, np.int32(staleness)
        )
        jax.block_until_ready(self.leaves)  # the vectors are ours for this call
        self.version += 1
        self.seen[header.worker] = header.life, header.sequence
        return Reply(None, self.version, staleness, jax.tree.map(np.asarray, metrics))

    def _updated(
        self,
        held: dict[int, Array],
        vectors: Vectors,
        scalars: dict[int, Array],
        numbers: dict[int, Array],
        base: dict[int, Array],
        staleness: Array,
    ) -> tuple[dict[int, Array], dict[str, Array]]:
        grads, correction = self._grads(vectors), self.spec.servers.correction
        at = {i: i - self.update.grads.start + self.update.params.start for i in grads}
        if correction == "delay":
            weight = scalars[self.update.scalars[0]]
            params = {index: held[at[index]] for index in grads}
            mean = {index: grad / weight.astype(grad.dtype) for index, grad in grads.items()}
            mean = delay(mean, params, {index: base[at[index]] for index in grads})
            grads = {index: grad * weight.astype(grad.dtype) for index, grad in mean.items()}
        new, metrics = self.update.update(self.index, {**held, **grads, **scalars}, numbers)
        if correction == "scale":
            old = {index: held[index] for index in self._params}
            new |= scale(old, {index: new[index] for index in old}, staleness)
        return new, metrics


class SummingShard(Shard):
    """A shard that updates once a step, with the sum of what workers pushed for it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        jitted, name = self.spec.jitted, self.index
        self._sum = jitted(f"sum {name}", lambda: self._summed)
        self._numbers = jitted("numbers", lambda: self.update.numbers, static_argnums=(0, 1))
        self._apply = jitted(f"apply {name}", lambda: self._updated, donate_argnums=0)

    def _forget(self) -> None:
        self._waiting: dict[int, tuple[Vectors, dict[int, Array]]] = {}
        self._sums: dict[int, Array] = {}

    def _keep_pulled(self, worker: int, sequence: int) -> None:
        pass  # its push is of the version that is updated

    def push(self, header: Header, content: Content) -> Reply:
        """Keep a gradient of the step that comes next, or refuse it."""
        vectors = self._vectors(content)
        reason = self._refused(header, vectors)
        if reason is None and header.step < self.version:
            reason = "late"
        elif reason is None and header.part in self._waiting:
            reason = "duplicate"
        elif reason is None and header.step > self.version:
            reason = "damaged"
        if reason is None:
            assert vectors is not None
            own = tuple(jnp.array(vector) for vector in vectors)  # they are ours for this call
            self._waiting[header.part] = own, self._scalars(header)
            self.seen[header.worker] = header.life, header.sequence
        return Reply(reason, self.version)

    def numbers(
        self, parts: Sequence[int], crossing: int, known: Mapping[int, Any]
    ) -> dict[int, np.ndarray]:
        """Add up the gradients of some parts; return what the other shards need of them."""
        if crossing == 0:
            self._sums = self._sum([self._waiting[part] for part in sorted(parts)])
        numbers = self._numbers(self.index, crossing, {**self.leaves, **self._sums}, dict(known))
        return {index: np.asarray(number) for index, number in numbers.items()}

    def commit(self, parts: Sequence[int], known: Mapping[int, Any]) -> Reply:
        """Update with the gradients of some parts, whose numbers of all shards are `known`."""
        if not self.update.crossings:
            self._sums = self._sum([self._waiting[part] for part in sorted(parts)])
        self.leaves, metrics = self._apply(self.leaves, self._sums, dict(known))
        self._forget()
        self.version += 1
        return Reply(None, self.version, 0, jax.tree.map(np.asarray, metrics))

    def _summed(self, parts: list[tuple[Vectors, dict[int, Array]]]) -> dict[int, Array]:
        every = [{**self._grads(vectors), **scalars} for vectors, scalars in parts]
        return {index: sum(part[index] for part in every[1:]) + every[0][index]
                for index in every[0]}  # fmt: skip

    def _updated(
        self, held: dict[int, Array], sums: dict[int, Array], numbers: dict[int, Array]
    ) -> tuple[dict[int, Array], dict[str, Array]]:
        return self.update.update(self.index, {**held, **sums}, numbers)


def make_shard(spec: RunSpec, index: int, incarnation: int, snapshot: Snapshot) -> Shard:
    """Return the shard of a run's mode."""
    kind = SummingShard if spec.servers.mode == "sync" else ApplyingShard
    return kind(spec, index, incarnation, snapshot)


def first_snapshot(spec: RunSpec, index: int, state: TrainState) -> Snapshot:
    """Return what a shard begins with, from the whole state, canonical."""
    leaves = jax.tree.leaves(state)
    version = state.steps_taken if spec.servers.mode == "sync" else 0
    held = {i: spec.update.piece(i, index, leaves[i]) for i in spec.update.held(index)}
    return Snapshot(version, {i: to_host(leaf) for i, leaf in held.items()}, {})


def joined_state(spec: RunSpec, snapshots: Sequence[Snapshot], step: int) -> TrainState:
    """Return the state, canonical, after `step` batches, from snapshots of all shards."""
    # Of what all of them have, such as the key, take what the one has that lost nothing.
    newest = max(range(len(snapshots)), key=lambda index: snapshots[index].version)
    state = spec.update.joined(
        [
            {i: from_host(leaf, spec.leaves[i]) for i, leaf in snapshot.leaves.items()}
            for snapshot in snapshots
        ],
        newest,
    )
    return dataclasses.replace(state, step=jnp.asarray(step, state.step.dtype))
