"""Data and states that do not fit the program they are given to."""

from plurax.errors.kinds import BatchError


def batch_is_empty() -> BatchError:
    return BatchError("the batch has no arrays, or no examples; a step needs at least one example.")


def batch_leaf_without_dim(path: str) -> BatchError:
    return BatchError(
        f"batch[{path}] is a scalar; every array of a batch needs the batch as its leading dim. "
        "Close over constants in the loss instead."
    )


def batch_leaf_not_numbers(path: str, dtype: str, kind: str) -> BatchError:
    ways = {
        "M": "Convert times to numbers first: (t - t.min()) / np.timedelta64(1, 's').",
        "m": "Convert durations to numbers first: t / np.timedelta64(1, 's').",
        "O": "Python objects become an array of numbers with np.stack(list(x)), or with "
        "x.astype(np.float32).",
        "V": "Give each field of a record as an array of its own.",
    }
    way = ways.get(kind, "Number the classes first: np.unique(x, return_inverse=True)[1].")
    name = f"batch[{path}]" if path else "the batch"
    return BatchError(f"{name} has dtype {dtype}, which no device can hold. {way}")


def batch_value_too_large(path: str, dtype: str, value: object, into: str) -> BatchError:
    name = f"batch[{path}]" if path else "the batch"
    return BatchError(
        f"{name} holds {value} as {dtype}, and JAX computes in {into}, which cannot represent it. "
        "Call jax.config.update('jax_enable_x64', True) before anything else to have 64 bits, or "
        "make the values smaller: renumber them, subtract an offset, or split them into two "
        "columns."
    )


def batch_uneven_leaves(sizes: dict[str, int]) -> BatchError:
    listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
    return BatchError(f"the arrays of a batch must have the same leading dim; given {listed}.")


def batch_too_large(given: int, compiled: int) -> BatchError:
    return BatchError(
        f"the batch has {given} examples and the program was compiled for at most {compiled}. "
        f"Split it, or compile with a batch of {given}; smaller batches need no new program."
    )


def batch_too_many_rows(rows: int, largest: int) -> BatchError:
    return BatchError(
        f"a batch (batch_size=, chunk=) of {rows:,} rows: a program takes at most {largest:,}. "
        "Give the number of examples of a step, which has to fit the devices' memory; "
        "plurax.max_batch_size finds the largest."
    )


def batch_mismatch(expected: str, given: str) -> BatchError:
    return BatchError(
        "the batch does not fit the program (B is any number of examples up to the compiled size)."
        f"\n  expected:\n{expected}\n  given:\n{given}"
    )


def batch_ragged(given: int, compiled: int) -> BatchError:
    return BatchError(
        f"a batch has {given} examples where {compiled} were asked for, and ragged='error'. "
        "With ragged='pad' it is trained exactly as it is; with ragged='drop' it is left out."
    )


def unknown_ragged(given: object) -> BatchError:
    return BatchError(f"ragged={given!r}: choose 'pad', 'drop' or 'error'.")


def state_was_donated() -> BatchError:
    return BatchError(
        "this state was given to an earlier step, which reused its memory for the new state. "
        "Keep what step returns: state, metrics = program.step(state, batch). "
        "To keep an old state, copy it first: jax.tree.map(jnp.copy, state)."
    )


def state_shares_array() -> BatchError:
    return BatchError(
        "an array is twice in this state, and a step reuses the memory of each array once. Copy it "
        "for its second place, jnp.copy(array), or program.place(state), which copies all."
    )


def batch_was_deleted(path: str) -> BatchError:
    name = f"batch[{path}]" if path else "the batch"
    return BatchError(
        f"{name} was given to a function that reused its memory (donate_argnums), or was deleted. "
        "Copy it before that, jnp.copy(array), or load it again."
    )


def state_mismatch(expected: str, given: str) -> BatchError:
    return BatchError(
        f"the state does not belong to this program.\n  expected:\n{expected}\n  given:\n{given}"
    )


def state_elsewhere(given: str, wanted: str) -> BatchError:
    return BatchError(
        "the state is on other devices than this program needs "
        f"({given} instead of {wanted}). Move it first: state = program.place(state)."
    )


def loop_needs_order() -> BatchError:
    return BatchError(
        "program.loop of one network needs the order of an epoch: order = "
        "program.place_epoch(rows, counts), as plurax.train.ArrayData(...).epoch_order(epoch) "
        "returns rows and counts."
    )


def loop_of_members(order: int) -> BatchError:
    given = f"an order of {order} arrays" if order else "a program compiled without data"
    return BatchError(
        f"members read their data each in its own order, and program.loop was given {given}. "
        "Compile with px.compile(..., members=members, data=data), and give () as the order."
    )


def data_needs_batch_size() -> BatchError:
    return BatchError(
        "fit(data=<arrays>) needs batch_size, the number of examples of a step; "
        "plurax.max_batch_size and plurax.fastest_batch_size can find one."
    )


def data_has_no_batches(why: str) -> BatchError:
    return BatchError(f"the data give no batch: {why}.")


def data_shorter(epoch: int, taken: int) -> BatchError:
    return BatchError(
        f"the run had taken {taken} batches of epoch {epoch} and was not at its end, and the data "
        "now give no more than that: the rest of the epoch would be left out. Give the data that "
        "the run was trained on, or train anew in another directory."
    )


def data_state_refused(reason: str) -> BatchError:
    return BatchError(
        f"the data cannot be restored to their saved position: {reason}\nGive the data that "
        "the run was trained on, or train anew in another directory."
    )


def data_not_understood(what: str, kind: str) -> BatchError:
    return BatchError(
        f"{what} of type {kind} are not supported; give arrays in a tree (a dict of arrays with "
        "the same leading dim), a Grain dataset of batches, or an iterable of batches."
    )


def data_is_a_table(what: str, kind: str) -> BatchError:
    return BatchError(
        f"{what} is a table ({kind}), and the loss takes arrays; give a dict of arrays: "
        "{'x': table[features].to_numpy(np.float32), 'y': table['label'].to_numpy()}."
    )


def data_is_a_dataset(what: str, kind: str) -> BatchError:
    return BatchError(
        f"{what} is a data set of single examples ({kind}); give its columns as arrays, "
        "dataset.with_format('numpy')[:], or batches of it: "
        "list(dataset.with_format('numpy').iter(batch_size))."
    )


def data_one_shot() -> BatchError:
    return BatchError(
        "the data are an iterator, which can be read only once; training reads them once per epoch "
        "and again after a resume. Give something that can be iterated again: a list, a Grain "
        "dataset, or an object whose __iter__ starts anew."
    )


def no_batch_fits(budget: int, smallest: int, needed: int) -> BatchError:
    return BatchError(
        f"no batch fits: the smallest possible, {smallest} example(s), needs {needed:,} bytes on "
        f"each device and the budget is {budget:,}. Give more memory=, more microbatches, or a "
        "plan that splits the parameters."
    )


def epochs_not_positive(epochs: object) -> BatchError:
    return BatchError(
        f"epochs={epochs!r}: give the number of passes over the data, a whole number ≥ 1."
    )


def report_every_not_positive(given: object) -> BatchError:
    return BatchError(f"report_every={given!r}: give a whole number of epochs, at least 1.")


def batch_size_not_positive(batch_size: object) -> BatchError:
    return BatchError(
        f"batch_size={batch_size!r}: give the number of examples of a step, a whole number ≥ 1."
    )


def mask_not_read(size: int, unit: int) -> BatchError:
    fits = f"{size - size % unit} or {size + -size % unit}" if size > unit else str(unit)
    return BatchError(
        f"batches of {size} examples need padding under a plan that splits them into {unit} (data "
        "× microbatches), and the coupled loss of this task does not read its mask, so the padding "
        "rows would count in what it couples, such as the statistics of batch norm. Use a batch "
        f"size that {unit} divides ({fits}), or leave out the rows where mask is false: flax's "
        "BatchNorm takes the mask in its call."
    )


def mask_not_read_by_members(size: int, largest: int) -> BatchError:
    return BatchError(
        f"a population got a batch of {size} examples, which would be padded to {largest}, and "
        "the coupled loss does not read its mask: the padding rows would count in what it couples, "
        "such as the statistics of batch norm. Leave out the rows where mask is false (flax's "
        "BatchNorm takes the mask in its call), or the batch (ragged='drop')."
    )


def checkpoint_every_not_positive(given: object) -> BatchError:
    return BatchError(
        f"checkpoint_every={given!r}: give the number of steps between checkpoints, a whole number "
        "≥ 1, or leave it out to save with each report only."
    )


def evaluate_every_not_positive(given: object) -> BatchError:
    return BatchError(
        f"evaluate_every={given!r}: give the number of steps between evaluations, a whole number "
        "≥ 1, or leave it out to evaluate after each epoch only."
    )


def evaluate_every_without_data(given: int) -> BatchError:
    return BatchError(
        f"evaluate_every={given} needs data to evaluate on: give fit(evaluation=...) too."
    )


def chunk_not_positive(given: object) -> BatchError:
    return BatchError(
        f"chunk={given!r}: give the number of inputs at a time, a whole number ≥ 1, or leave it "
        "out for the batch size."
    )


def shuffle_not_a_bool(given: object) -> BatchError:
    return BatchError(f"shuffle={given!r}: give True for a new order each epoch, or False.")


def steps_not_positive(given: object) -> BatchError:
    return BatchError(f"steps={given!r}: give a whole number of steps, at least 1.")


def rollback_not_a_count(name: str, given: object) -> BatchError:
    what = {
        "after": "the number of bad steps in a row that roll a run back, 0 for never",
        "limit": "the number of rollbacks before a run stops",
    }
    return BatchError(f"Rollback({name}={given!r}): give {what[name]}, a whole number ≥ 0.")


def rollback_spike(given: object) -> BatchError:
    return BatchError(
        f"Rollback(spike={given!r}): give the standard deviations above the mean from which a loss "
        "is a spike, a number above 0 such as 6.0, or None to look for no spikes."
    )


def rollback_one_network(what: str) -> BatchError:
    why = {
        "members": "a member with a step that is not finite is frozen while the others go on",
        "servers": "workers and servers leave a bad gradient out and go on",
    }
    return BatchError(
        f"rollback= is for one network without servers, and {what}= is given: {why[what]}. Leave "
        "rollback= out."
    )


def rollback_kind(given: object) -> BatchError:
    return BatchError(
        f"rollback is {given!r}, and must be a plurax.Rollback. Write "
        "rollback=plurax.Rollback(after=10), or plurax.Rollback(after=0) for no rollbacks."
    )


def own_rows_not_split(size: int, processes: int) -> BatchError:
    return BatchError(
        f"rows of its own need rows that each of the {processes} processes has for itself: the "
        f"plan's data axis must go over all processes, and the batch of {size} examples must "
        "divide by data times microbatches. Otherwise give every process the whole batch, without "
        "local_batches or local."
    )


def own_rows_wrong_count(count: int, own: int) -> BatchError:
    return BatchError(
        f"this process gave a batch of {count} examples, and its share is {own}. With "
        "local_batches=True all processes give equally many at every step; use ragged='drop' to "
        "leave out a smaller last batch."
    )


def local_batches_need_batches() -> BatchError:
    return BatchError(
        "local_batches=True is for an iterable of which each process gives its own rows of every "
        "batch. Of arrays each process reads only its own rows anyway: leave local_batches out."
    )


def data_of_unequal_length(ended: int, other: int) -> BatchError:
    return BatchError(
        f"the data of process {ended} ended, and process {other} has another batch. Every process "
        "must give the same batches, or with local_batches=True its own rows of them."
    )


def own_inputs_of_one_network() -> BatchError:
    return BatchError(
        "predict(local=True) is for arrays of inputs, of one network. Of a population, and of an "
        "iterable, every process gives the same inputs and gets all outputs: leave local out."
    )
