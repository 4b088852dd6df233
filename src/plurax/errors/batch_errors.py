"""Data, states and predictions that do not fit the program they are given to."""

from plurax.errors.kinds import BatchError


def batch_is_empty() -> BatchError:
    return BatchError("the batch has no arrays, or no examples; at least one example is needed.")


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


def batch_mismatch(expected: str, given: str, what: str = "the batch") -> BatchError:
    return BatchError(
        f"{what} does not fit the program (B is any number of examples up to the compiled size)."
        f"\n  expected:\n{expected}\n  given:\n{given}"
    )


def batch_ragged(given: int, compiled: int) -> BatchError:
    return BatchError(
        f"a batch has {given} examples where {compiled} were asked for, and ragged='error'. "
        "With ragged='pad' it is trained exactly as it is; with ragged='drop' it is left out."
    )


def data_needs_batch_size() -> BatchError:
    return BatchError(
        "fit(data=<arrays>) needs batch_size, the number of examples of a step; "
        "plurax.analysis.max_batch_size and plurax.analysis.fastest_batch_size can find one."
    )


def data_has_no_batches(why: str) -> BatchError:
    return BatchError(f"the data give no batch: {why}.")


def data_shorter(epoch: int, taken: int) -> BatchError:
    return BatchError(
        f"the run had taken {taken} batches of epoch {epoch} and was not at its end, and the data "
        "now give no more than that: the rest of the epoch would be left out. Give the data that "
        "the run was trained on, or train anew in another directory."
    )


def data_one_shot() -> BatchError:
    return BatchError(
        "the data are an iterator, which can be read only once; training reads them once per epoch "
        "and again after a resume. Give something that can be iterated again: a list, a Grain "
        "dataset, or an object whose __iter__ starts anew."
    )


def steps_exceed_batch(function: str, batch_size: int, rows: int) -> BatchError:
    """Of arrays whose steps have more examples than the batch that a program is compiled for."""
    return BatchError(
        f"{function}: the steps of data=ArrayData(..., batch_size={batch_size}) have {batch_size} "
        f"examples, and batch has {rows}, the most that a step of the program takes. Give a batch "
        f"of {batch_size}, or plurax.train.ArrayData(arrays, {rows})."
    )


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


def own_rows_not_split(size: int, processes: int) -> BatchError:
    return BatchError(
        f"rows of its own need rows that each of the {processes} processes has for itself: the "
        f"plan's data axis must go over all processes, with one number of microbatches, and the "
        f"batch of {size} examples must divide by data times microbatches. Otherwise give every "
        "process the whole batch, without local_batches or local."
    )


def local_batches_need_batches() -> BatchError:
    return BatchError(
        "local_batches=True is for an iterable of which each process gives its own rows of every "
        "batch. Of arrays each process reads only its own rows anyway: leave local_batches out."
    )


def picture_of_nothing(function: str, wanted: str) -> BatchError:
    return BatchError(f"{function} got nothing to draw; give at least one {wanted}.")
