"""Search ranks plans by estimates, keeps what is pinned, and says what cannot be."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from benchmarks import gpt
from tests import models
from tests.pictures import legend, panels
from tests.planning import BytesSent
from tests.promotion import allowed

import plurax as px
from plurax.analysis.estimate import estimate_trace, human_seconds
from plurax.execute.recorder import record_step
from plurax.machine_fields import Level
from plurax.planner import effort, search
from plurax.planner.attention_in_blocks import STREAM
from plurax.planner.candidate_queue import CandidateQueue
from plurax.planner.candidates import CandidatePlan
from plurax.planner.costs import TimeCosts, state_ratios
from plurax.planner.layer import layer_of
from plurax.planner.learned import Computed, Learned
from plurax.planner.sizes import Sizes
from plurax.planner.tensor_search import TensorSearch
from plurax.report.layer_picture import draw_found
from plurax.strategies import Strategies, Strategy
from plurax.tree import human_bytes

# Products cost most: 1 Gflop/s, and links and memory of 1 TB/s.
SLOW = px.Machine("slow products", {"float32": 1e9}, 1e9, 1e12, [Level("node", 4, 1e12)])
# A message costs more than all else.
FAR = px.Machine("far apart", {"float32": 1e12}, 1e9, 1e12, [Level("node", 4, 1e12, 1.0)])


def like(size):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), models.data(size))


def searched(machine, **options):
    return px.search(models.mlp_task(), optax.adam(1e-2), models.data(64), machine, **options)


@pytest.fixture(scope="module")
def found():
    return searched(SLOW, pinned={"remat": "none", "microbatches": 1}, count=3)


@pytest.mark.ci
@pytest.mark.parametrize("machine", [SLOW, FAR], ids=lambda machine: machine.name)
def test_a_search_ends_once_no_bound_is_below_its_best(machine):
    first, five = (
        searched(machine, pinned={"tensor": 1}, count=count, evaluations=64) for count in (1, 5)
    )
    assert first.evaluations == five.evaluations < 16
    assert first.best == five.best
    assert first.gap == five.gap == 0


def test_a_search_goes_on_where_bounds_prove_nothing():
    unproven = searched(FAR, pinned={"remat": "none"}, count=1)
    assert unproven.gap > 0.5
    assert unproven.evaluations >= 8


def test_plans_that_are_tried_warn_of_nothing():
    """A warning would be an error here. Who compiles the plan is warned."""

    def whitened(grads, state, params=None):
        return jax.tree.map(lambda g: -g @ g.T @ g if g.ndim == 2 else -g, grads), state

    args = models.mlp_task(), optax.GradientTransformation(lambda params: (), whitened)
    pinned = {"data": 4, "zero": 1, "tensor": 1, "stream": None}
    found = px.search(*args, models.data(64), SLOW, pinned=pinned, evaluations=2)
    with pytest.warns(px.errors.ShardingWarning, match="update needs whole tensors"):
        px.compile(*args, found.best, models.data(64))


@functools.cache
def search_gpt(fast_memory):
    """Return what is found, and the plans that were put off."""
    model = gpt.Gpt(depth=24, width=2304, heads=24)
    machine = px.Machine.preset("8xA100-80GB", nodes=4)
    put_off, waiting = CandidateQueue.put_off, []

    def noted(queue, seconds, candidate):
        waiting.append(candidate)
        put_off(queue, seconds, candidate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CandidateQueue, "put_off", noted)
        found = px.search(
            allowed(model.task()),
            optax.adam(1e-3),
            model.batch(512),
            dataclasses.replace(machine, fast_memory=fast_memory),
            pinned={"precision": "bfloat16"},
        )
    return found, waiting


@pytest.mark.ci
def test_no_further_tensor_is_solved_for_plans_that_stay_behind():
    """By their bounds plans of GPT that keep all come before those that keep products, and an
    estimate says that they are slower."""
    found, _ = search_gpt(fast_memory=0)
    assert found.gap == 0
    # The smallest is, for the bounds of the others.
    assert found.shardings.has_solved(2, "none")
    assert not any(
        found.shardings.has_solved(tensor, remat)
        for tensor in (4, 8, 16, 32)
        for remat in ("none", "dots", "full")
    )
    behind = [one.seconds / found.ranked[0].seconds for one in found.ranked]
    assert len(behind) == 5
    assert max(behind) < 1.2


@pytest.mark.ci
@pytest.mark.parametrize(("fast_memory", "some"), [(0, True), (1e6, False)])
def test_bounds_of_devices_with_a_fast_memory_put_nothing_off(fast_memory, some):
    _, waiting = search_gpt(fast_memory=fast_memory)
    assert bool(waiting) == some


@pytest.mark.ci
def test_the_ranking_is_of_estimates(found):
    assert [one.seconds for one in found.ranked] == sorted(one.seconds for one in found.ranked)
    best = found.ranked[0]
    again = px.estimate(models.mlp_task(), optax.adam(1e-2), best.plan, models.data(64), SLOW)
    assert again.seconds == best.seconds
    assert again.peak == best.memory
    assert best.plan.devices == 4, "products cost most, so all devices share them"
    one = px.estimate(models.mlp_task(), optax.adam(1e-2), px.Plan(), models.data(64), SLOW)
    assert best.seconds < one.seconds / 3
    assert found.gap == 0


@pytest.mark.ci
def test_the_best_plan_runs(found):
    task, batch = models.mlp_task(), models.data(64)
    program = px.compile(task, optax.adam(1e-2), found.best, batch)
    state, _ = program.step(program.init(seed=0), batch)
    alone = px.compile(task, optax.adam(1e-2), px.Plan(), batch)
    expected, _ = alone.step(alone.init(seed=0), batch)
    got = jax.device_get(program.to_canonical(state).params)
    assert models.max_rel_error(got, jax.device_get(expected.params)) < 1e-5


def test_one_device_where_messages_cost_most():
    found = searched(FAR, pinned={"tensor": 1}, count=1)
    assert found.best.devices == 1


def test_the_text_says_what_was_found(found):
    text = str(found)
    assert "the fastest of" in text
    assert "slow products" in text
    assert "products" in text.splitlines()[3]
    assert "no plan is faster, by bounds of what was not estimated" in text
    assert repr(found).startswith("Found(")
    assert "<table>" in found._repr_html_()


@pytest.mark.ci
def test_what_is_pinned_holds():
    pinned = {"data": 2, "tensor": 1, "microbatches": 1, "remat": "offload"}
    found = searched(SLOW, pinned=px.Plan(zero=1, **pinned), count=1, evaluations=1)
    assert (found.best.data, found.best.zero, found.best.remat) == (2, 1, "offload")
    rules = {"out": ("tensor", None)}
    pinned = {"tensor": 2, "data": 1, "remat": "none", "shardings": rules}
    by_rule = searched(SLOW, pinned=pinned, count=1, evaluations=1)
    assert by_rule.best.tensor == 2
    assert dict(by_rule.best.rules)["out"] == ("tensor", None)


def test_a_strategy_of_an_equation_is_pinned_by_hand():
    plan = px.Plan(tensor=2, remat="none")
    fields = {"tensor": 2, "data": 1, "remat": "none", "microbatches": 1}
    every = TensorSearch(models.mlp_task(), like(64), lambda plan: BytesSent()).plan(plan)
    product = next(one for one in every.strategies.equations if one.operator == "dot_general")
    # Both operands replicated: each device computes the whole product.
    whole = dataclasses.replace(product, inputs=((None, None), (None, None)))
    assert whole.inputs != product.inputs
    pinned = {**fields, "strategies": Strategies(every.strategies.traced, [whole])}
    found = searched(SLOW, pinned=pinned, count=1)
    assert found.best.tensor == 2
    assert whole in found.best.strategies.equations
    free = searched(SLOW, pinned=fields, count=1)
    assert found.ranked[0].seconds > free.ranked[0].seconds
    program = px.compile(models.mlp_task(), optax.adam(1e-2), found.best, models.data(64))
    program.step(program.init(seed=0), models.data(64))


def test_a_pinned_axis_over_which_nothing_is_worth_splitting_is_named():
    with pytest.raises(px.errors.PlanError, match=r"none splits a matrix product: .* larger batch"):
        searched(FAR, pinned={"tensor": 2, "data": 1, "pipeline": 1})


def test_a_pinned_strategy_of_another_model_is_named():
    unknown = Strategies("0" * 16, [Strategy("0 dot_general", (("tensor", None), ()), "")])
    pinned = px.Plan(tensor=2, strategies=unknown)
    with pytest.raises(
        px.errors.PlanError, match="no plan that agrees with what is pinned can be:"
    ) as it:
        searched(SLOW, pinned=pinned, count=1)
    assert "the plan's strategies were found for" in str(it.value)


def test_large_parameters_are_split_where_they_do_not_fit_whole():
    """Where sending costs most rows are split over `tensor`, as data parallelism does."""
    task, plan = models.mlp_task(), px.Plan(tensor=4)

    def held(memory):
        search = TensorSearch(task, like(6400), lambda one: BytesSent(), memory=memory)
        found = search.sharded(plan).shardings
        assert search.sharded(plan).shardings is found, "found once"
        shape = jax.eval_shape(task.init, jax.random.key(0))
        return {
            path: one.shard_shape(shape[path].shape, {"tensor": 4}) for path, one in found.items()
        }

    assert held(1000.0)["hidden"] == (5, 4)
    assert held(1000.0)["out"] == (4, 3)
    assert held(1e9) != held(1000.0)


@pytest.mark.ci
def test_stages_on_faster_devices_get_more_layers():
    kinds = [(1, px.Machine("fast", {"float32": 4e9}, 1e9, 1e12)),
             (1, px.Machine("slow", {"float32": 1e9}, 1e9, 1e12))]  # fmt: skip
    both = px.Machine.uneven("both", kinds, [Level("node", 2, 1e12)])
    task, optimizer, batch = models.transformer_stack(), optax.sgd(0.1), models.text(8)
    pinned = {"tensor": 1, "schedule": "1f1b", "microbatches": 8, "remat": "none", "pipeline": 2}
    found = px.search(task, optimizer, batch, both, pinned=pinned, count=1)
    first, last = found.best.layers
    assert first > last
    even = px.estimate(task, optimizer, px.Plan(pipeline=2, microbatches=8), batch, both)
    assert found.ranked[0].seconds < 0.9 * even.seconds
    # Over `tensor` devices must be alike.
    with pytest.raises(px.errors.PlanError, match=r"tensor=2.*both.*differ"):
        px.search(task, optimizer, batch, both, pinned={"data": 1, "tensor": 2, "pipeline": 1})


def test_why_a_parameter_is_split():
    pinned = {"tensor": 4, "data": 1, "microbatches": 1, "remat": "none"}
    found = searched(SLOW, pinned=pinned, count=1)
    text = found.explain("hidden")
    assert text.startswith("hidden (5, 16) under tensor=4\n  is ")
    assert re.search(r"\n    .*: [\d.]+ (µs|ms|s) more, \+[\d.]+%$", text)


@pytest.mark.ci
def test_a_plan_that_fits_is_needed():
    with pytest.raises(px.errors.PlanError, match=r"no plan fits in 10 bytes per device"):
        searched(SLOW, pinned={"tensor": 1}, memory=10.0)
    with pytest.raises(px.errors.PlanError, match="must be a divisor of the 4 devices"):
        searched(SLOW, pinned=px.Plan(data=3))
    six = dataclasses.replace(SLOW, levels=[Level("node", 6, 1e12)])
    with pytest.raises(px.errors.PlanError, match="a divisor of the 6 devices or 4, data at most"):
        searched(six, pinned=px.Plan(data=5))
    pinned = {"tensor": 1, "remat": "none"}
    little = searched(SLOW, pinned=pinned, memory=6000.0, count=1)
    assert little.ranked[0].memory <= 6000 < max(one.memory for one in little.refused)


def test_attention_is_computed_in_blocks_where_it_fits_in_no_other_way():
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((1, 4096, 64), "float32")}
    pinned = {"context": 1, "tensor": 1, "pipeline": 1, "remat": "full"}
    assert searched_for(task, optimizer, batch, pinned, "200MB").best.stream == STREAM
    with pytest.raises(px.errors.PlanError, match="no plan fits in 200,000,000 bytes"):
        searched_for(task, optimizer, batch, pinned | {"stream": None}, "200MB")


@pytest.mark.ci
@pytest.mark.parametrize("memory", ["80MB", "12MB"])
def test_tokens_are_split_where_no_plan_is_faster(memory):
    """Of one row halves fit in 80 MB, and in 12 quarters whose keys go around a ring.

    Blocks are of at least 512 keys.
    """
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((1, 4096, 64), "float32")}
    pinned = {"tensor": 1, "pipeline": 1, "zero": 0, "remat": "full"}
    found = searched_for(task, optimizer, batch, pinned, memory)
    fitting = []
    sizes = {STREAM, found.best.stream}
    for context, size in itertools.product((1, 2, 4), sizes):
        for strategy in ("gather", "ring", "heads", "heads+ring"):
            plan = px.Plan(context=context, context_strategy=strategy, remat="full", stream=size)
            estimate = px.estimate(task, optimizer, plan, batch, SLOW)
            if estimate.peak + estimate.margin <= found.memory:
                fitting.append(estimate.seconds)
    assert found.ranked[0].seconds == min(fitting)
    assert found.best.context == 4
    assert found.ranked[0].memory <= found.memory


@pytest.mark.ci
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_attention_is_computed_in_blocks_where_it_fits_and_is_faster_so(tokens):
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((4, tokens, 64), "float32")}
    pinned = {"tensor": 1, "pipeline": 1, "zero": 0, "remat": "full"}
    found = searched_for(task, optimizer, batch, pinned, "4GB")
    whole = searched_for(task, optimizer, batch, pinned | {"stream": None}, "4GB")
    assert (found.best.data, found.best.context) == (4, 1)
    assert found.best.stream >= STREAM
    assert found.ranked[0].seconds < whole.ranked[0].seconds


@pytest.mark.ci
def test_attention_stays_as_it_is_written_where_blocks_are_slower():
    """Two plans are estimated in blocks, and no others are searched."""
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((4, 1024, 64), "float32")}
    pinned = {"tensor": 1, "pipeline": 1, "zero": 0}
    machine = px.Machine.preset("4xH100-80GB")
    found = px.search(task, optimizer, batch, machine, pinned=pinned)
    whole = px.search(task, optimizer, batch, machine, pinned=pinned | {"stream": None})
    assert found.best == whole.best
    assert found.evaluations == whole.evaluations + 2
    blocks = dataclasses.replace(whole.best, stream=STREAM)
    assert whole.estimated(blocks).seconds > whole.ranked[0].seconds


@pytest.mark.ci
def test_tokens_of_fewer_rows_than_devices_are_split_though_they_fit():
    """Attention is as it is written, and no plan of one row on four devices is faster."""
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((1, 256, 64), "float32")}
    pinned = {"pipeline": 1, "tensor": 1, "zero": 0, "remat": "none"}
    found = searched_for(task, optimizer, batch, pinned)
    seconds = [
        px.estimate(task, optimizer, plan, batch, SLOW).seconds
        for strategy in ("gather", "ring", "heads")
        for plan in [px.Plan(context=4, context_strategy=strategy, stream=256)]
    ]
    assert (found.best.context, found.best.stream) == (4, 256)
    assert found.ranked[0].seconds == min(seconds)
    whole = searched_for(task, optimizer, batch, pinned | {"context": 1})
    assert 2 * found.ranked[0].seconds < whole.ranked[0].seconds


@pytest.mark.ci
def test_tokens_of_as_many_rows_as_devices_stay_whole():
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((4, 4096, 64), "float32")}
    pinned = {"tensor": 1, "pipeline": 1, "zero": 0, "remat": "full"}
    found = searched_for(task, optimizer, batch, pinned, "200MB")
    assert (found.best.data, found.best.context, found.best.stream) == (4, 1, STREAM)


@pytest.mark.ci
def test_tokens_are_split_where_blocks_are_held():
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((1, 1024, 64), "float32")}
    pinned = {"tensor": 1, "pipeline": 1, "zero": 0, "remat": "none", "stream": 256}
    assert searched_for(task, optimizer, batch, pinned).best.context == 4
    assert searched_for(task, optimizer, batch, pinned | {"context": 1}).best.context == 1
    assert searched_for(task, optimizer, batch, pinned | {"stream": None}).best.context == 1


@pytest.mark.ci
def test_tokens_that_fit_in_no_way():
    task, optimizer = models.attention_task(64, 4), optax.sgd(0.1)
    batch = {"x": jax.ShapeDtypeStruct((1, 4096, 64), "float32")}
    pinned = {"tensor": 1, "pipeline": 1, "zero": 0, "remat": "full"}
    with pytest.raises(px.errors.PlanError, match=r"The nearest:\n  context=4, .*stream=512"):
        searched_for(task, optimizer, batch, pinned, "8MB")
    with pytest.raises(px.errors.PlanError, match="no plan fits in 25,000,000 bytes"):
        searched_for(task, optimizer, batch, pinned | {"context": 2, "stream": 512}, "25MB")


def test_tokens_are_not_split_over_devices_that_are_pinned_to_others():
    """The refusal names no `context`, of which nothing was said."""
    task, batch = models.attention_task(64, 4), {"x": jax.ShapeDtypeStruct((4, 512, 64), "float32")}
    with pytest.raises(px.errors.PlanError, match="no plan fits in 1,000 bytes"):
        searched_for(task, optax.sgd(0.1), batch, {"data": 4, "stream": 256}, 1000)


@pytest.mark.ci
def test_what_devices_share_of_a_row_counts_as_a_share():
    """Of half of the tokens a device computes and keeps half, beside copies of parameters."""
    task, batch = models.attention_task(64, 4), {"x": jax.ShapeDtypeStruct((2, 512, 64), "float32")}
    shardings = TensorSearch(task, batch, lambda plan: TimeCosts(SLOW, plan), machine=SLOW)
    whole, half = px.Plan(stream=128), px.Plan(context=2, stream=128)
    assert 0.5 < shardings.memory(half)[1] / shardings.memory(whole)[1] < 0.6
    assert 0.4 < shardings.seconds(half) / shardings.seconds(whole) < 0.6


def searched_for(task, optimizer, batch, pinned, memory=None):
    return px.search(task, optimizer, batch, SLOW, pinned=pinned, memory=memory, count=1)


def test_many_microbatches_are_estimated_from_few():
    """A table of all actions is not drawn up, and what is left out does not count."""
    task, batch = models.transformer_stack(), models.text(96)
    plan = px.Plan(pipeline=2, microbatches=48)
    steady = px.estimate(task, optax.sgd(0.1), plan, batch, SLOW)
    exact = estimate_trace(record_step(task, optax.sgd(0.1), plan, batch), SLOW)
    assert steady.seconds == pytest.approx(exact.seconds, rel=0.002)
    assert steady.peak == pytest.approx(exact.peak, rel=0.02)
    assert steady.bytes_sent == pytest.approx(exact.bytes_sent)
    assert (steady.plan, steady.batch_size) == (exact.plan, exact.batch_size)


@pytest.mark.ci
@pytest.mark.parametrize("pinned", [{}, {"pipeline": 2}], ids=str)
def test_plans_are_ranked_by_what_an_estimate_says(pinned):
    """To the bit: there is one clock."""
    task, batch = models.transformer_stack(), models.text(96)
    found = px.search(task, optax.adam(1e-3), batch, SLOW, pinned=pinned, count=3, evaluations=3)
    for ranked in found.ranked:
        alone = px.estimate(task, optax.adam(1e-3), ranked.plan, batch, SLOW)
        assert (ranked.seconds, ranked.memory) == (alone.seconds, alone.peak)


# --- Pictures -------------------------------------------------------------------------------------


def widths(axes):
    """The lengths of bars, summed along each row, from the top."""
    rows = {}
    for bar in axes.patches:
        rows[bar.get_y()] = rows.get(bar.get_y(), 0.0) + bar.get_width()
    return [rows[y] for y in sorted(rows)]


def test_a_search_is_drawn(found, tmp_path, drawn):
    px.analysis.draw_search(found, tmp_path / "search.png")
    figure = drawn["search.png"]
    seconds, _, frontier = panels(figure)
    assert widths(figure.axes[0]) == pytest.approx([one.seconds for one in found.ranked])
    assert widths(figure.axes[1]) == pytest.approx([one.memory for one in found.ranked])
    for rank, one in enumerate(found.ranked, 1):
        assert f"{rank}  {one.plan.sizes_text()}" in seconds.texts
        assert human_seconds(one.seconds) in seconds.texts
    assert {"matrix products", "parameters", "temporaries"} <= {*legend(figure)}
    every = [*found.ranked, *found.slower, *(o for o in found.refused if o.estimate)]
    assert f"the {len(every)} plans that were estimated" in frontier.title
    assert frontier.texts[:2] == ["1, chosen", "2"]
    drawn_points = sum(len(cloud.get_offsets()) for cloud in figure.axes[2].collections)
    assert drawn_points == len(every)


def test_plans_that_do_not_fit_are_drawn_beyond_the_limit(found, tmp_path, drawn):
    first, *others = sorted((*found.ranked, *found.slower), key=lambda one: one.memory)
    limit = float(first.memory)
    over = tuple(dataclasses.replace(one, why="memory") for one in others if one.memory > limit)
    assert over
    little = dataclasses.replace(found, memory=limit, ranked=(first,), slower=(), refused=over)
    px.analysis.draw_search(little, tmp_path / "little.png")
    figure = drawn["little.png"]
    assert panels(figure)[2].texts[-2:] == [f"limit {human_bytes(limit)}", "does not fit"]
    fit, _, over, chosen = (cloud.get_offsets()[:, 0] for cloud in figure.axes[2].collections[:4])
    assert (fit <= limit).all()
    assert (over > limit).all()
    assert (len(over), len(chosen)) == (sum(o.estimate is not None for o in little.refused), 1)


def test_estimates_are_drawn_by_name(found, tmp_path, drawn):
    px.analysis.draw_estimates({"mine": found.estimate}, tmp_path / "mine.png")
    seconds, memory = panels(drawn["mine.png"])
    assert "mine" in seconds.texts
    assert memory.title == "memory of a device, of 953.7 MiB"
    with pytest.raises(px.errors.BatchError, match="draw_estimates got nothing to draw"):
        px.analysis.draw_estimates({})


def layer(task, batch, plan):
    """One layer of the solution for a plan's own rules."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return layer_of(TensorSearch(task, like, lambda plan: BytesSent()).sharded(plan))


def test_a_layer_sends_what_megatron_sends():
    plan = px.Plan(tensor=2, shardings=models.megatron())
    found = layer(models.transformer_stack(), models.text(1), plan)
    products = [box for box in found.boxes if box.kind == "product"]
    given = {
        found.boxes[e.source].name: e.target for e in found.edges if found.boxes[e.source].name
    }
    assert {*given} == {f"blocks/{n}" for n in ("qkv", "attention_out", "hidden", "bias", "out")}
    assert len(products) == 6, "three of parameters and attention, the scores and the mean"
    # Two all-reduces, each of the whole activations, in a ring of two.
    assert found.bytes_sent == 2 * models.TOKENS * models.WIDTH * 4
    for name in ("attention_out", "out"):
        assert found.boxes[given[f"blocks/{name}"]].sharding.partial
    for name in ("qkv", "hidden"):
        assert "tensor" in found.boxes[given[f"blocks/{name}"]].sharding.axes
    (first,), (last,) = ([b for b in found.boxes if b.kind == k] for k in ("input", "output"))
    assert first.tensor.shape == last.tensor.shape == (1, models.TOKENS, models.WIDTH)
    assert found.depths()[-1] == max(found.depths()), "everything leads to the output"
    assert len(found.boxes) < 24
    read = {edge.source for edge in found.edges}
    assert read == {*range(len(found.boxes) - 1)}, "what the output does not need is left out"
    computed = [box for box in found.boxes if box.kind in ("product", "other")]
    assert all("models.py:" in box.where for box in computed), "what JAX computes has its caller's"


def test_of_equal_layers_the_first_is_drawn():
    def init(key):
        return {"in": jnp.ones((6, 12)), "layers": [{"w": jnp.ones((12, 12))} for _ in range(4)]}

    def loss(params, batch, keys):
        x = batch["x"] @ params["in"]
        for one in params["layers"]:
            x = x + jnp.tanh(x @ one["w"])
        return x.sum(1)

    found = layer(px.Task(init=init, loss=loss), {"x": jnp.ones((8, 6))}, px.Plan(tensor=2))
    assert [box.name for box in found.boxes if box.kind == "parameter"] == ["layers/0/w"]
    assert [box.kind for box in found.boxes if box.kind != "parameter"] == [
        "input", "product", "other", "output"
    ]  # fmt: skip
    assert not found.whole


def test_without_layers_the_forward_pass_is_drawn():
    found = layer(models.mlp_task(), models.data(8), px.Plan(tensor=2))
    assert {box.name for box in found.boxes if box.kind == "parameter"} == {"hidden", "bias", "out"}
    assert [box.kind for box in found.boxes].count("product") == 2
    assert found.whole


def test_a_layer_is_drawn(tmp_path, drawn):
    pinned = {"tensor": 4, "data": 1, "microbatches": 1, "remat": "none"}
    found = searched(SLOW, pinned=pinned, count=1)
    px.analysis.draw_layer(found, tmp_path / "layer.png")
    (panel,) = panels(drawn["layer.png"])
    boxes = layer_of(found.shardings.sharded(found.best)).boxes
    assert len(panel.texts) >= 2 * len(boxes)
    assert "hidden" in panel.texts
    assert any("/4" in text for text in panel.texts)
    written = draw_found(found, tmp_path / "both")
    assert [path.name for path in written] == ["search.png", "layer.png"]
    with pytest.raises(px.errors.PlanError, match="costs more than it saves, so there is nothing"):
        px.analysis.draw_layer(searched(SLOW, pinned={"tensor": 1}, count=1, evaluations=1))


STAGES = [
    {"data": 2, "pipeline": 2, "microbatches": 4},
    {"pipeline": 2, "microbatches": 4, "schedule": "gpipe", "remat": "full"},
    {"pipeline": 2, "tensor": 2, "microbatches": 8, "schedule": "zb-h1"},
    {"data": 2, "zero": 1, "microbatches": 2},
]


@pytest.mark.parametrize("fields", STAGES, ids=str)
def test_what_is_computed_is_near_its_estimate(fields):
    """From one solved graph, the seconds of plans whose stages run in lockstep."""
    task, batch, optimizer = models.transformer_stack(), models.text(16), optax.adam(1e-3)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    ratios = state_ratios(optimizer, jax.eval_shape(task.init, jax.random.key(0)))
    shardings = TensorSearch(task, like, lambda plan: TimeCosts(SLOW, plan, ratios), ratios)
    plan = px.Plan(**fields)
    found = px.estimate(task, optimizer, shardings.plan(plan), batch, SLOW)
    assert shardings.seconds(plan) == pytest.approx(found.seconds, rel=0.15)
    own, kept = shardings.memory(plan)
    assert own == pytest.approx(found.peak - found.memory["temporaries"], rel=0.35)
    assert 0 < kept < 2 * found.memory["temporaries"]


def test_an_estimate_corrects_what_was_computed_of_plans_alike():
    plan = px.Plan(data=2, pipeline=2, microbatches=4)
    found = px.estimate(models.transformer_stack(), optax.sgd(0.1), plan, models.text(8), SLOW)
    learned = Learned({"none": 0.0})
    computed = Computed(seconds=found.seconds / 2, own=0.0, kept=found.peak / 3)
    assert learned.memory(plan, computed) == pytest.approx(found.peak / 3 / 1.2)
    learned.add(plan, Sizes(2, 2, 1, 4, 0, "none", "1f1b", 1), computed, found, found.seconds / 2)
    assert learned.seconds(plan, computed) == pytest.approx(found.seconds)
    assert learned.memory(plan, computed) == pytest.approx(found.peak / 1.05)
    other = dataclasses.replace(plan, tensor=2)
    assert learned.memory(other, computed) == pytest.approx(found.peak / 1.2)
    assert learned.seconds(px.Plan(data=2), computed) == computed.seconds


STARTS = px.Machine("starts", {"float32": 1e15}, 1e9, 1e15, [Level("node", 4, 1e15)], overhead=1.0)


def test_estimates_raise_the_bounds_of_plans_on_as_many_devices():
    """A kernel takes a second to start, and nothing else takes time."""
    plan = px.Plan(data=2, microbatches=4)
    estimated = px.estimate(models.mlp_task(), optax.sgd(0.1), plan, models.data(64), STARTS)
    gradient, update = estimated.gradient.overhead, estimated.update.overhead
    products = 5.0
    learned = Learned({"none": products, "dots": products})
    sizes = Sizes(2, 1, 1, 4, 0, "none", "1f1b", 1)
    bound = 4 * products + 0.1
    assert learned.least(sizes, bound) == bound
    learned.add(plan, sizes, Computed(bound, 0.0, 1.0), estimated, bound)
    own = gradient / 4 - products  # what a microbatch starts beside its products
    # Never above the estimate itself, which rounds down what was too much.
    assert learned.least(sizes, bound) == pytest.approx(estimated.seconds)
    share = min(1, estimated.seconds / (bound + 4 * own + update))
    assert learned.least(sizes._replace(data=4, microbatches=8), 8 * products) == pytest.approx(
        share * (8 * products + 8 * own + update)
    )
    staged = sizes._replace(pipeline=2)
    assert learned.least(staged, 10.0) == pytest.approx(share * (10.0 + (4 * own + update) / 2))
    # A policy without an estimate may start fewer.
    assert learned.least(sizes._replace(remat="dots"), 10.0) == pytest.approx(10.0 + update)
    alone = sizes._replace(data=1)  # sends no gradients, and may start fewer
    assert learned.least(alone, 10.0) == pytest.approx(share * (10.0 + update))


def test_policies_that_start_fewer_kernels_have_lower_bounds():
    """On a GPU `dots` starts fewer than `none`: XLA fuses what is computed again."""
    task, optimizer, batch = models.transformer_stack(), optax.adam(1e-3), models.text(64)
    machine = px.Machine.preset("4xA100-80GB")

    def estimated(sizes):
        plan = px.Plan(data=sizes.data, zero=sizes.zero, remat=sizes.remat)
        return plan, px.estimate(task, optimizer, plan, batch, machine)

    learned = Learned({"none": 0.0, "dots": 0.0})
    alone = Sizes(1, 1, 1, 1, 0, "none", "1f1b", 1)
    for sizes in (
        alone._replace(data=4, zero=1), alone._replace(data=4, zero=1, remat="dots"), alone
    ):  # fmt: skip
        plan, found = estimated(sizes)
        learned.add(plan, sizes, Computed(1e-9, 0.0, 1.0), found, 0.0)
        assert learned.least(sizes, 0.0) <= found.seconds
    least = learned.least(alone._replace(remat="dots"), 0.0)
    _, fastest = estimated(alone._replace(remat="dots"))
    assert fastest.seconds < 0.95 * found.seconds
    assert 0.95 * fastest.seconds < least <= fastest.seconds


@pytest.mark.ci
def test_no_plan_is_faster_than_its_bound(monkeypatch):
    """Of plans that were not estimated, beside what their estimates would have said."""
    runs = []
    look = search._Search.look

    def noted(run, every, count):
        runs.append((run, every))
        look(run, every, count)

    monkeypatch.setattr(search._Search, "look", noted)
    few = searched(SLOW, evaluations=2, count=1, pinned={"tensor": 1, "pipeline": 1})
    ((run, every),) = runs
    looked_at = {one.candidate for one in (*few.ranked, *few.slower)}
    left = [one for one in every if one.plan not in looked_at and one.sizes.microbatches in (1, 8)]
    assert len(left) > 12
    for candidate in left[::2]:
        plan = candidate.plan
        estimated = px.estimate(models.mlp_task(), optax.adam(1e-2), plan, models.data(64), SLOW)
        least = run._least(candidate)
        # Traffic that is fused away is in a bound: 0.1 % at the most here.
        assert 0.5 * estimated.seconds < least <= estimated.seconds * 1.002, plan
        assert few.least_left <= max(least, few.ranked[0].seconds)
    assert few.gap == max(0, 1 - few.least_left / few.ranked[0].seconds)


class Clock:
    """A clock that runs faster the more often it is read, as of a computer that is ever busier."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def perf_counter(self):
        self.now, self.step = self.now + self.step, 1.1 * self.step
        return self.now


def test_a_search_is_a_function_of_its_arguments(found, monkeypatch):
    """On a computer on which everything takes hours it finds the same."""
    slow = Clock(3600.0)
    monkeypatch.setattr(search, "time", slow)
    monkeypatch.setattr(effort, "time", slow)
    again = searched(SLOW, pinned={"remat": "none", "microbatches": 1}, count=3)
    for name in (
        "ranked", "slower", "refused", "least_left", "least_expected", "evaluations", "stopped",
    ):  # fmt: skip
        assert getattr(again, name) == getattr(found, name), name
    assert again.seconds > 3600
    assert not again.stopped


def test_more_evaluations_than_asked_are_made_for_experts_alone():
    pinned = {"remat": "none", "tensor": 1}
    few, more = (searched(SLOW, evaluations=n, count=1, pinned=pinned) for n in (2, 24))
    assert few.evaluations <= 2 * 2
    assert 2 < few.evaluations <= more.evaluations
    assert more.ranked[0].seconds <= few.ranked[0].seconds
    assert f"by {few.evaluations} evaluations" in str(few)


def test_a_limit_of_time_stops_a_search_and_it_says_so(monkeypatch):
    pinned = {"remat": "none", "tensor": 1}
    free = searched(SLOW, count=1, pinned=pinned)
    slow = Clock(1.0)
    monkeypatch.setattr(search, "time", slow)
    monkeypatch.setattr(effort, "time", slow)
    limited = searched(SLOW, count=1, pinned=pinned, seconds=10)
    assert limited.stopped
    assert limited.evaluations < free.evaluations
    assert "stopped by its limit of time" in str(limited)
    assert "stopped" not in str(free)


def test_devices_that_are_left_unused_are_named():
    found = searched(FAR, count=1, pinned={"tensor": 1})
    assert "the fastest uses 1 of 4 devices" in str(found)


def test_of_equally_fast_plans_the_surer_one_comes_first():
    sizes = Sizes(1, 1, 1, 1, 0, "none", "1f1b", 1)
    queue = CandidateQueue()
    computed = Computed(2.0, 0.0, 0.0)
    for memory, risk, known in ((9.0, 1.4, computed), (1.0, 1.0, computed), (5.0, 1.2, None)):
        queue.push(2.0, CandidatePlan(sizes, px.Plan(), 2.0, memory), known, risk=risk)
    assert queue.expected() == [2.0, 2.0], "without the risk, nor the one with a bound alone"
    assert [queue.pop()[1].memory for _ in range(3)] == [1.0, 5.0, 9.0]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_solution_leaves_updates_to_its_candidates(microbatches):
    """They are of a step, not of a row: what they take does not grow with the rows."""
    task, like = models.mlp_task(), jax.eval_shape(lambda: models.data(64))
    costs = TimeCosts(px.Machine.preset("4xA100-80GB"), px.Plan(data=2, microbatches=microbatches))
    solved = TensorSearch(task, like, lambda plan: costs).sharded(costs.plan)
    of_parameters = sum(solved.parameter_seconds(costs))
    assert of_parameters > 0
    of_rows = microbatches * solved.profile.seconds + solved.profile.once
    assert solved.solution.cost == pytest.approx(of_rows + of_parameters)
