"""Define what is trained, as pure functions that know no device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from plurax import errors, tree
from plurax.validate import check_takes
from plurax.whole_batch import OverBatch, WeightedOutputs, over_batch

Losses = Float[Array, "B"]
LossOutput = Losses | tuple[Losses, dict[str, Losses]]


@dataclasses.dataclass(frozen=True)
class Task:
    """The functions of a training problem: pure, over a batch, written as for one device.

    **Fields:**

    - `init(key) -> params`: the parameters, any tree of floating arrays.
    - `loss(params, batch, keys)`: one loss per example, shape `(B,)`; or `((B,) losses,
      {name: (B,) metrics})`. `batch` is a tree of arrays with leading dim `B`, `keys` holds one
      random key per example, shape `(B,)`. The library does every sum. Row `i` of what it returns
      depends on row `i` alone, which is checked when it is compiled; or it is `coupled`.
    - `predict(params, inputs) -> outputs`: trees of arrays with leading dim `B`; row `i` of the
      outputs depends on row `i` of the inputs.
    - `evaluate(params, batch)`: like `loss` without keys, for evaluation (no dropout). Without it,
      evaluation calls `loss` with fixed keys, one for each example by its place in the data.
    - `metrics(params, batch) -> {name: Metric}`: metrics over the data of an evaluation that are
      no means, such as AUC (`plurax.metrics`).
    - `weight(batch) -> (B,)`: the weight of each example (its tokens, say); default ones. The
      loss of a step is `sum(weight * loss) / sum(weight)`, over all microbatches and devices.
    - `frozen`: patterns of the paths of parameters that are not trained; see `plurax.freeze`.
    - `coupled`: the loss couples examples (contrastive, batch statistics). It is then called as
      `loss(params, batch, keys, mask)` with every example of a microbatch across all devices;
      `mask`, shape `(B,)` of bool, is false for padding rows, which must not enter the coupling.
      A loss of `plurax.over_batch` is always coupled, and over all microbatches.
    - `stateful`: the loss reads and writes model state that is not trained (batch-norm
      statistics). Then `init(key) -> (params, model_state)`, `loss(params, model_state, batch,
      keys, mask) -> (losses, metrics, model_state)`, and `predict`, `evaluate` and `metrics` take
      `model_state` after `params`. Needs `coupled`. Microbatches run in order, and each reads the
      state that the previous one wrote.

    Raises `TaskError` where a function does not accept these arguments.

    >>> import jax, jax.numpy as jnp
    >>> task = Task(
    ...     init=lambda key: {"w": jnp.zeros(3)},
    ...     loss=lambda params, batch, keys: (batch["x"] @ params["w"] - batch["y"]) ** 2,
    ...     predict=lambda params, inputs: inputs["x"] @ params["w"],
    ... )
    """

    init: Callable[[Key[Array, ""]], Any]
    loss: Callable[..., Any]
    predict: Callable[..., PyTree] | None = None
    evaluate: Callable[..., LossOutput] | None = None
    metrics: Callable[..., dict[str, Any]] | None = None
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None
    frozen: tuple[str, ...] = ()
    coupled: bool = False
    stateful: bool = False
    stack: Optional["Stack"] = None
    """The parts of a task that `plurax.stack` returned; else None."""

    def __post_init__(self) -> None:
        if isinstance(self.loss, OverBatch):
            object.__setattr__(self, "coupled", True)
        if self.stateful and not (self.coupled or isinstance(self.loss, WeightedOutputs)):
            raise errors.TaskError(
                "Task(stateful=True) needs coupled=True: a loss that writes model state "
                "(batch-norm statistics) makes examples depend on each other. With coupled=True it "
                "sees every example of a microbatch across all devices."
            )
        frozen: Any = self.frozen
        if isinstance(frozen, str) or not all(isinstance(one, str) for one in frozen):
            raise errors.TaskError(
                f"frozen={frozen!r}: give patterns of paths, plurax.freeze(task, 'embed/*', "
                "'head/bias')."
            )
        params = "params, model_state" if self.stateful else "params"
        mask = ", mask" if self.coupled else ""
        check_takes("Task.init", self.init, "key")
        if isinstance(self.loss, OverBatch):
            self.loss.check(params, stateful=self.stateful)
        else:
            check_takes("Task.loss", self.loss, f"{params}, batch, keys{mask}")
        for name, function, arguments in (
            ("Task.predict", self.predict, f"{params}, inputs"),
            ("Task.evaluate", self.evaluate, f"{params}, batch"),
            ("Task.metrics", self.metrics, f"{params}, batch"),
            ("Task.weight", self.weight, "batch"),
        ):
            if function is not None:
                check_takes(name, function, arguments)

    @property
    def couples_microbatches(self) -> bool:
        """Whether microbatches change the loss, as one that couples the examples of each."""
        return self.coupled and not isinstance(self.loss, OverBatch)


def per_example(
    f: Callable[[PyTree, PyTree, Key[Array, ""]], Any],
) -> Callable[[PyTree, PyTree, Key[Array, "B"]], LossOutput]:
    """Lift a loss written for one example to a batch, with one random key per example.

    **Arguments:**

    - `f(params, example, key)`: returns a scalar loss, or `(loss, {name: scalar})`. `example` is
      the batch's tree without the leading dim.

    **Returns:** a function `(params, batch, keys) -> (B,) losses` for `Task(loss=...)`. Raises
    `TaskError` when `f` does not return scalars.

    >>> import jax, jax.numpy as jnp
    >>> loss = per_example(lambda params, example, key: (params * example["x"]).sum())
    >>> loss(2.0, {"x": jnp.ones((3, 4))}, jax.random.split(jax.random.key(0), 3))
    Array([8., 8., 8.], dtype=float32)
    """

    check_takes("per_example(f)", f, "params, example, key")

    @functools.wraps(f)
    def one(params: PyTree, example: PyTree, key: Key[Array, ""]) -> Any:
        output = f(params, example, key)
        for leaf in jax.tree.leaves(output):
            if jnp.shape(leaf) != ():
                raise errors.TaskError(
                    f"per_example(f): f(params, example, key) returned shape {jnp.shape(leaf)} for "
                    "one example; it must return a scalar. Sum or average over the example's own "
                    "dims inside f."
                )
        return output

    return jax.vmap(one, in_axes=(None, 0, 0))


class Layer(NamedTuple):
    """A part of a network as a pair of pure functions.

    **Fields:** `init(key) -> params`; `apply(params, ...)`, its other arguments as in `stack`.
    """

    init: Callable[[Key[Array, ""]], PyTree]
    apply: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Stack:
    """A network of equal layers between an embedding and a head; `stack` creates it.

    **Fields:** `embed`, `block`, `head`; `depth`; `tied`, names of parameters of `embed` that are
    passed to the head too; `predict`; `metrics`.
    """

    embed: Layer
    block: Layer
    head: Layer
    depth: int
    tied: tuple[str, ...] = ()
    predict: Callable[..., PyTree] | None = None
    metrics: Callable[..., dict[str, Any]] | None = None

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Return parameters `embed`, `blocks` with a leading dim of layers, `head`."""
        embed, blocks, head = jax.random.split(key, 3)
        return {
            "embed": self.embed.init(embed),
            "blocks": jax.vmap(self.block.init)(jax.random.split(blocks, self.depth)),
            "head": self.head.init(head),
        }

    def apply_embed(self, embed: PyTree, batch: PyTree, keys: Any) -> PyTree:
        """Return the input of the first layer."""
        return self.embed.apply(embed, batch, _folded(keys, self.depth))

    def apply_block(self, layer: PyTree, x: PyTree, batch: PyTree, keys: Any, index: Any) -> PyTree:
        """Return the output of layer `number`.

        Raises `TaskError` where its shapes or dtypes differ from the input's.
        """
        new = self.block.apply(layer, x, batch, _folded(keys, index))
        given, made = tree.describe(x), tree.describe(new)
        if given != made:
            raise errors.TaskError(
                f"a layer of plurax.stack got\n{given}\nand returned\n{made}\nbut every layer must "
                "return the shapes and dtypes that it gets. Change them in `embed` or `head`."
            )
        return new

    def apply_head(self, params: PyTree, x: PyTree, batch: PyTree, keys: Any) -> Any:
        """Return losses from the last layer's output, of an `OverBatch` its outputs.

        `params` are as `head_params` returns them.
        """
        apply = self.head.apply
        fun = apply.outputs if isinstance(apply, OverBatch) else apply
        return fun(params, x, batch, _folded(keys, self.depth + 1))

    def head_params(self, params: PyTree) -> PyTree:
        """Return the head's parameters, including those tied to the embedding's."""
        if not self.tied:
            return params["head"]
        return {**params["head"], **{name: params["embed"][name] for name in self.tied}}

    def layers(self, params: PyTree, batch: PyTree, keys: Any) -> PyTree:
        """Return the last layer's output, running all layers in a scan."""

        def body(x: PyTree, numbered: tuple[PyTree, Any]) -> tuple[PyTree, None]:
            layer, index = numbered
            return self.apply_block(layer, x, batch, keys, index), None

        x = self.apply_embed(params["embed"], batch, keys)
        indices = jnp.arange(self.depth, dtype=jnp.int32)
        return jax.lax.scan(body, x, (params["blocks"], indices))[0]


def stack(
    embed: tuple[Callable[..., Any], Callable[..., Any]],
    block: tuple[Callable[..., Any], Callable[..., Any]],
    head: tuple[Callable[..., Any], Callable[..., Any]],
    depth: int,
    *,
    predict: Callable[..., PyTree] | None = None,
    metrics: Callable[..., dict[str, Any]] | None = None,
    tied: Sequence[str] = (),
    weight: Callable[[PyTree], Float[Array, "B"]] | None = None,
) -> Task:
    """Return a task of `depth` equal layers between an embedding and a head.

    It is an ordinary task with a scan over its layers, and under a plan with `pipeline` the layers
    can be split into stages. Embedding, layer and head are pairs `(init, apply)`, all for batches:

    - `embed`: `init(key) -> params`, `apply(params, batch, keys) -> x`, a floating array or tree of
      them with leading dim `B`.
    - `block`: `apply(params, x, batch, keys) -> x`, of the same shapes and dtypes.
    - `head`: `apply(params, x, batch, keys) -> (B,) losses`, or with metrics as `Task.loss`; or
      `over_batch(outputs, losses)` with `outputs(params, x, batch, keys)`, without evaluation.
    - `depth`: the number of layers; stages need not divide it.
    - `predict(params, x, inputs) -> outputs`: the head's outputs for inference.
    - `metrics(params, x, batch) -> {name: Metric}`: as `Task.metrics`, from the head's parameters
      and the last layer's output.
    - `tied`: names of parameters of `embed` that are added to the head's parameters.
    - `weight`: as in `Task`.

    `keys` has one random key per example, different for each layer; in evaluation and prediction
    it is None: leave dropout out.

    **Returns:** a `Task` with parameters `embed`, `blocks` (with a leading dim of layers), `head`.

    Raises `TaskError` where a layer's output differs from its input in shape or dtype, or `tied`
    names no parameter of `embed`.

    >>> import jax, jax.numpy as jnp
    >>> def linear(key): return jax.random.normal(key, (3, 3))
    >>> task = stack(
    ...     embed=(lambda key: {}, lambda params, batch, keys: batch["x"]),
    ...     block=(linear, lambda w, x, batch, keys: jnp.tanh(x @ w)),
    ...     head=(linear, lambda w, x, batch, keys: ((x @ w) ** 2).sum(1)),
    ...     depth=4,
    ... )
    >>> task.init(jax.random.key(0))["blocks"].shape
    (4, 3, 3)
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 10**6:
        raise errors.TaskError(
            f"stack(depth={depth!r}): depth must be a whole number from 1 to 1,000,000."
        )
    parts = Stack(Layer(*embed), Layer(*block), Layer(*head), depth, tuple(tied), predict, metrics)

    def init(key: Key[Array, ""]) -> PyTree:
        params = parts.init(key)
        if tied and not (isinstance(params["embed"], dict) and isinstance(params["head"], dict)):
            raise errors.TaskError(
                f"stack(tied={tied!r}): parameters are tied by name, so the parameters of `embed` "
                "and of `head` must be dicts; `head` may have none of its own: lambda key: {}."
            )
        for name in tied:
            if name not in params["embed"]:
                raise errors.TaskError(
                    f"stack(tied=...) names {name!r}, and the parameters of `embed` are "
                    f"{', '.join(map(repr, params['embed'])) or 'none'}."
                )
        return params

    def loss(params: PyTree, batch: PyTree, keys: Any = None) -> Any:
        x = parts.layers(params, batch, keys)
        return parts.apply_head(parts.head_params(params), x, batch, keys)

    def outputs(params: PyTree, inputs: PyTree) -> PyTree:
        assert predict is not None
        return predict(parts.head_params(params), parts.layers(params, inputs, None), inputs)

    def over_data(params: PyTree, batch: PyTree) -> dict[str, Any]:
        assert metrics is not None
        return metrics(parts.head_params(params), parts.layers(params, batch, None), batch)

    # Losses that compare examples have no meaning for the chunks of an evaluation.
    of_head: Any = parts.head.apply
    by_row = not isinstance(of_head, OverBatch)
    return Task(
        init=init,
        loss=loss if by_row else over_batch(loss, of_head.losses),
        predict=None if predict is None else outputs,
        evaluate=loss if by_row else None,
        metrics=None if metrics is None else over_data,
        weight=weight,
        stack=parts,
    )


def _folded(keys: Any, index: Any) -> Any:
    """Return the keys of one layer, from those of the examples; None without keys."""
    if keys is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
