"""Save, verify and restore training state, with Orbax.

A checkpoint holds the state, and beside it as JSON: where the run stands in its data, the
shapes of all leaves, and a fingerprint of each. Orbax does not notice a flipped byte; the
fingerprints do. A checkpoint that cannot be restored is set aside by name, never deleted, and the
one before it is taken.
"""

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree, UInt32

from plurax import errors, tree
from plurax.state import TrainState


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint could not be restored and was set aside."""


class Checkpoints:
    """The checkpoints of one run, in one directory; the newest `keep` are kept.

    Saving goes on in the background while training continues; `close` waits for it. Use as a
    context manager.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3) -> None:
        self.directory = Path(directory).absolute()
        try:
            self._manager = self._open(keep)
        except OSError as error:
            raise errors.checkpoint_not_written(str(directory), str(error)) from None
        self._keep = keep

    def _open(self, keep: int) -> ocp.CheckpointManager:
        # What a killed process left half-written. Orbax would clear it in the background, where it
        # races with whoever opens the directory next.
        for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        return ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Save a state and its JSON description; returns before the bytes are on disk.

        Raises `CheckpointError` if this or the save before it failed.
        """
        step = state.steps_taken
        if step in self._manager.all_steps():
            return
        plain = _plain(state)
        prints = jax.device_get(_fingerprints(plain))
        meta = {
            **meta,
            "key_impl": str(jax.random.key_impl(state.key)),
            "shapes": tree.describe(plain),
            "fingerprints": {path: int(value) for path, value in prints.items()},
        }
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(plain), meta=ocp.args.JsonSave(meta)
                ),
            )
        except Exception as error:
            raise errors.checkpoint_not_written(str(self.directory), str(error)) from error

    def newest_meta(self) -> dict[str, Any] | None:
        """The JSON description of the newest state whose description can be read."""
        for step in reversed(self.steps()):
            with contextlib.suppress(Exception):
                return self._read_meta(step)
        return None

    def _read_meta(self, step: int) -> dict[str, Any]:
        meta = self._manager.restore(
            step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
        ).meta
        if meta is None:
            raise ValueError("its description is missing")
        return meta

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest state that can be restored whole, and its JSON; None if there is none.

        **Arguments:**

        - `like`: `Program.state_shapes`: shapes, dtypes and where each leaf shall lie. The plan
          that saved the state does not matter.

        Damaged checkpoints are renamed `<step>.damaged` with a warning. Raises `CheckpointError`
        where only damaged ones are left, or where the state is of another task or optimizer.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self._restore(step, like)
            except errors.CheckpointError:
                raise
            except Exception as error:
                reason = f"step {step}: {_first_line(error)}"
                reasons.append(reason)
                aside = self._set_aside(step)
                warnings.warn(
                    f"the checkpoint of {reason}; set aside as {aside}",
                    DamagedCheckpointWarning,
                    stacklevel=2,
                )
        if reasons:
            raise errors.checkpoint_all_damaged(str(self.directory), reasons)
        return None

    def _restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        meta = self._read_meta(step)
        plain_like = _plain(like)
        if meta["shapes"] != tree.describe(plain_like):
            raise errors.checkpoint_mismatch(
                str(self.directory), tree.describe(plain_like), meta["shapes"]
            )
        plain = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(plain_like))
        ).state
        found = jax.device_get(_fingerprints(plain))
        damaged = [
            path for path, value in found.items() if int(value) != meta["fingerprints"].get(path)
        ]
        if damaged:
            raise ValueError(f"the bytes of {', '.join(damaged)} are not those that were saved")
        key = jax.random.wrap_key_data(plain["key"], impl=meta["key_impl"])
        state = TrainState(**{**plain, "key": key})
        return state, meta

    def _set_aside(self, step: int) -> str:
        source = self.directory / str(step)
        target = self.directory / f"{step}.damaged"
        try:
            source.rename(target)
        except OSError:
            return str(source)
        self._manager.reload()
        return target.name

    def wait(self) -> None:
        """Wait until what was saved is on disk. Raises `CheckpointError` if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise errors.checkpoint_not_written(str(self.directory), str(error)) from error

    def close(self) -> None:
        """Wait, and let go of the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()


def _plain(state: TrainState) -> dict[str, PyTree]:
    """The state as a dict of ordinary arrays; the random key as its data."""
    key: Any = state.key
    if isinstance(key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, key)
        key = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=state.step.sharding)
    else:
        key = jax.random.key_data(key)
    return {
        "step": state.step,
        "params": state.params,
        "opt_state": state.opt_state,
        "model_state": state.model_state,
        "key": key,
        "skipped": state.skipped,
    }


@jax.jit
def _fingerprints(values: PyTree) -> dict[str, UInt32[Array, ""]]:
    return {path: fingerprint(leaf) for path, leaf in tree.named_leaves(values).items()}


def fingerprint(leaf: Array) -> UInt32[Array, ""]:
    """A 32-bit sum over an array's bits, each word weighted by its place; the same however sharded.

    The weights are odd, so that a change of any single word shows. Integer sums do not depend on
    their order.

    >>> import jax.numpy as jnp
    >>> int(fingerprint(jnp.array([1, 2], jnp.int32)))
    7
    """
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    size = min(leaf.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, length in enumerate(words.shape):
        place = place * jnp.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
