"""A bit that is flipped in one copy is found and named, under every kind of plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax import errors, tree
from plurax.cli import dispatch
from plurax.execute.program import Program
from plurax.execute.replicas import ReplicaCheck
from plurax.fingerprint import BLOCK, TOGETHER, checksums

TENSOR = {"blocks/hidden": (..., "tensor"), "blocks/out": (..., "tensor", None)}

# A plan, its members, how many copies there are of the leaf that is changed, and that leaf.
PLANS = {
    "data": (px.Plan(data=4), None, 4, "params/blocks/hidden"),
    "data, 8 devices": (px.Plan(data=8, microbatches=2), None, 8, "opt_state/0/mu/blocks/bias"),
    "two copies": (px.Plan(data=2), None, 2, "params/blocks/hidden"),
    "zero 1": (px.Plan(data=4, zero=1), None, 4, "params/blocks/hidden"),
    "zero 2": (px.Plan(data=4, zero=2, microbatches=2), None, 4, "params/blocks/bias"),
    "zero 3": (px.Plan(data=4, zero=3), None, 4, "step"),
    "tensor": (px.Plan(tensor=4, shardings=TENSOR), None, 4, "params/head/gain"),
    "tensor, split": (
        px.Plan(data=4, tensor=2, shardings=TENSOR), None, 4, "params/blocks/hidden"
    ),
    "tensor and zero": (
        px.Plan(data=4, tensor=2, zero=1, shardings=TENSOR), None, 4, "params/blocks/hidden"
    ),
    "pipeline": (px.Plan(pipeline=4, microbatches=4), None, 4, "key"),
    "pipeline, a stage's own": (
        px.Plan(data=4, pipeline=2, microbatches=2), None, 4, "params/head/gain"
    ),
    "pipeline, layers": (
        px.Plan(data=4, pipeline=2, microbatches=2, zero=1), None, 4, "params/blocks/hidden"
    ),
    "members": (px.Plan(member=2, data=4, chunk=1, batch_dim="major"), 4, 4,
                "params/blocks/hidden"),
    "members in stages": (
        px.Plan(member=2, data=2, pipeline=2, microbatches=2, chunk=1, batch_dim="major"), 2, 2,
        "opt_state/0/nu/blocks/hidden",
    ),
}  # fmt: skip


def flipped(leaf, device, bit=9):
    """Return an array with one bit changed in the copy of one device."""
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    numbers = jax.random.key_data(leaf) if key else leaf
    copies = []
    for shard in numbers.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint8)[data.nbytes // 2 + bit // 8] ^= 1 << bit % 8
        copies.append(jax.device_put(data, shard.device))
    changed = jax.make_array_from_single_device_arrays(numbers.shape, numbers.sharding, copies)
    return jax.random.wrap_key_data(changed) if key else changed


def with_flip(program, state, name, device):
    """Return the stored state with a bit flipped in the leaves whose name begins so: the first."""
    names = jax.tree.leaves(program._functions.layout.names)
    leaves, structure = jax.tree.flatten(state)
    index = next(n for n, one in enumerate(names) if one.startswith(name))
    leaves[index] = flipped(leaves[index], device)
    return jax.tree.unflatten(structure, leaves), names[index]


def trained(plan, members, steps=3):
    program = px.compile(
        models.transformer_stack(depth=4),
        optax.adamw(1e-2),
        plan,
        models.text(16),
        members=members and px.Members(members),
    )
    state = program.init() if members else program.init(seed=0)
    for seed in range(steps):
        state, _ = program.step(state, models.text(16, seed=seed))
    return program, state


@pytest.mark.parametrize("name", PLANS)
def test_a_flipped_bit_is_found_and_named(name):
    plan, members, copies, leaf = PLANS[name]
    program, state = trained(plan, members)
    by_id = {device.id: device for device in jax.devices()}
    assert program.replicas.check(state) == []
    for device in (program.mesh.devices.flat[0], program.mesh.devices.flat[-1]):
        changed, found_name = with_flip(program, state, leaf, device)
        found = program.replicas.check(changed)
        assert device.id in [one.device for one in found]
        assert all(one.local == jax.devices().index(by_id[one.device]) for one in found)
        assert {(one.process, one.leaves, one.certain) for one in found} == {
            (0, (found_name,), copies > 2)
        }
        assert len(found) == (1 if copies > 2 else 2)


@pytest.mark.ci
def test_every_leaf_that_has_copies_is_compared():
    program, state = trained(px.Plan(data=4, zero=1), None)
    names = [name for name in tree.named_leaves(state) if not name.startswith("opt_state")]
    assert {*names, "opt_state/0/count"} <= {*program.replicas.leaves}
    for name in program.replicas.leaves:
        device = program.mesh.devices.flat[2]
        changed, _ = with_flip(program, state, name, device)
        assert [one.leaves for one in program.replicas.check(changed)] == [(name,)]
    split, _ = trained(px.Plan(data=4, zero=3), None)
    assert not [name for name in split.replicas.leaves if name.startswith("params")]


@pytest.mark.ci
def test_two_faulty_copies_of_four_leave_no_majority():
    program, state = trained(px.Plan(data=4), None)
    one, two, *_ = program.mesh.devices.flat
    changed, _ = with_flip(program, state, "step", one)
    assert [found.device for found in program.replicas.check(changed)] == [one.id]
    changed, _ = with_flip(program, changed, "step", two)  # in the same bit: two against two
    found = program.replicas.check(changed)
    assert len(found) == 4
    assert not any(one.certain for one in found)


@pytest.mark.parametrize(
    ("plan", "members"),
    [(px.Plan(), None), (px.Plan(member=2, chunk=1, batch_dim="major"), 4)],
    ids=["one device", "members alone"],
)
def test_where_there_are_no_copies_nothing_runs(plan, members, monkeypatch):
    program, state = trained(plan, members)
    monkeypatch.setattr(ReplicaCheck, "_compiled", None)
    assert program.replicas.leaves == ()
    assert program.replicas.check(state) == []


KINDS = "float32 float64 bfloat16 int8 uint16 int4 bool complex64 complex128"


@pytest.mark.parametrize("dtype", KINDS.split())
@pytest.mark.parametrize("size", [0, 1, 5, 8 * BLOCK, 9 * BLOCK + 3])
def test_a_checksum_sees_each_element_and_its_place(x64, dtype, size):
    kinds = 2 if dtype == "bool" else 7
    given = np.arange(size) % kinds
    both = jax.jit(lambda leaf: [checksums([leaf], blocks=blocks)[0] for blocks in (False, True)])

    def found(numbers):
        whole, blocks = both(jnp.asarray(numbers).astype(dtype))
        assert whole == blocks
        return int(whole)

    for index in {size // 2, size - 1} if size else ():
        changed = given.copy()
        changed[index] = (changed[index] + 1) % kinds
        assert found(changed) != found(given)
    if size > 5:
        swapped = given.copy()
        swapped[[1, size - 1]] = swapped[[size - 1, 1]]
        assert (found(swapped) == found(given)) == (given[1] == given[-1])


def test_checksums_are_in_the_order_of_their_arrays():
    """Of several sizes and dtypes, more of one kind than a loop takes at once."""
    rng = np.random.default_rng(0)
    sizes = [9000, 3, 9000, 12000] + [9000] * TOGETHER + [3]
    leaves = [rng.normal(size=size).astype("int8" if n % 3 else "float32")
              for n, size in enumerate(sizes)]  # fmt: skip
    alone = [int(checksums([leaf], blocks=True)[0]) for leaf in map(jnp.asarray, leaves)]
    together = jax.jit(lambda leaves: checksums(leaves, blocks=True))(leaves)
    whole = jax.jit(lambda leaves: checksums(leaves, blocks=False))(leaves)
    assert together.tolist() == whole.tolist() == alone
    assert len({*alone}) == len(sizes)


@pytest.mark.ci
def test_a_checksum_holds_no_second_array(uncached):
    if not uncached:
        return
    for dtype in (jnp.float32, jnp.int32, jnp.uint8):
        leaf = jax.ShapeDtypeStruct((1000, 1000), dtype)
        compiled = jax.jit(lambda leaf: checksums([leaf], blocks=True)).lower(leaf).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 64 * BLOCK


# --- In training ----------------------------------------------------------------------------------


def fit(output=None, **options):
    return px.fit(
        models.transformer_stack(depth=4), optax.adamw(1e-2), models.text(64), batch_size=8,
        plan=px.Plan(data=4), progress=False, epochs=4, output=output, **options,
    )  # fmt: skip


@pytest.fixture
def flip_after(monkeypatch):
    """A function after which the device 2 has a flipped bit once a step is taken."""

    def flip(step, name="params/blocks/hidden"):
        run = Program.loop

        def wrapped(program, state, *args):
            before = state.steps_taken
            state, metrics = run(program, state, *args)
            if before < step <= state.steps_taken:
                state, _ = with_flip(program, state, name, program.mesh.devices.flat[2])
            return state, metrics

        monkeypatch.setattr(Program, "loop", wrapped)

    return flip


@pytest.mark.ci
@pytest.mark.parametrize("resident", [pytest.param(True, marks=pytest.mark.slow), False])
def test_nothing_poisoned_is_saved_and_the_run_goes_on(flip_after, monkeypatch, tmp_path, resident):
    wanted = fit(resident=resident).state
    flip_after(19)
    with pytest.raises(
        px.errors.ReplicaError, match=r"device 2 of process 0 holds other bits than"
    ) as said:
        fit(tmp_path, resident=resident, check_replicas_every=1000)
    assert "params/blocks/hidden" in str(said.value)
    assert px.Checkpoints(tmp_path / "checkpoints").steps() == [8, 16]
    monkeypatch.undo()
    again = fit(tmp_path, resident=resident, resume=True)
    assert models.same_bits(
        (wanted.params, wanted.opt_state), (again.state.params, again.state.opt_state)
    )


@pytest.mark.ci
def test_a_flipped_bit_is_found_within_some_steps(flip_after):
    flip_after(7, "opt_state/0/mu/blocks/out")
    with pytest.raises(px.errors.ReplicaError, match="after step 10 device 2 of process 0"):
        fit(resident=False, check_replicas_every=5, checkpoint_every=5)
    with pytest.raises(px.errors.ReplicaError, match="after step 32 device 2 of process 0"):
        fit(resident=False, check_replicas_every=32)  # read after the last step


def test_nothing_is_compared_where_that_is_asked_for(flip_after):
    flip_after(7)
    assert fit(resident=False, check_replicas_every=None).state.steps_taken == 32


def test_the_command_ends_with_a_code_of_its_own(monkeypatch, capsys):
    def train(arguments):
        raise errors.replicas_differ(7, ["device 2 of process 0"], ["params/w"], True)

    monkeypatch.setattr("plurax.cli.train_command.train_experiment", train)
    with pytest.raises(SystemExit) as said:
        dispatch.main(["train", "file.py"])
    assert said.value.code == 78
    assert "after step 7 device 2 of process 0 holds other bits" in capsys.readouterr().err
