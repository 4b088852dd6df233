"""What goes wrong for a user: five kinds of error, one builder per message.

Every message says what is wrong, where, why, and what to write instead. The tests pin
their text. `assert` is for mistakes of our own.
"""

import difflib
from collections.abc import Iterable


class PluraxError(ValueError):
    """Base of every error that a user of plurax can cause."""


class PlanError(PluraxError):
    """A plan that cannot run."""


class TaskError(PluraxError):
    """A task whose functions do not keep their contract."""


class BatchError(PluraxError):
    """Data that do not fit the program they are given to."""


class MembersError(PluraxError):
    """A population that cannot be made, or does not fit where it is used."""


class CheckpointError(PluraxError):
    """A checkpoint that cannot be written or read."""


class ExperimentError(PluraxError):
    """A file given to the command line that does not define a usable experiment."""


# --- Plans ------------------------------------------------------------------------------------


def plan_field_not_positive(field: str, value: object) -> PlanError:
    hint = "leave it out to have it chosen" if field == "chunk" else f"{field}=1 means 'not used'"
    return PlanError(
        f"Plan({field}={value!r}): {field} must be a whole number of at least 1; {hint}."
    )


def plan_field_not_a_choice(field: str, value: object, choices: Iterable[str]) -> PlanError:
    names = ", ".join(repr(choice) for choice in choices)
    return PlanError(f"Plan({field}={value!r}): {field} must be one of {names}.")


def plan_needs_devices(axes: dict[str, int], needed: int, available: int, fits: str) -> PlanError:
    sizes = " × ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
    have = "1 is available" if available == 1 else f"{available} are available"
    return PlanError(
        f"the plan needs {needed} devices ({sizes}) and {have}; {fits} would fit. "
        f"To rehearse the plan on CPU, start with {needed} virtual devices: "
        f"plurax.virtual_devices({needed}) before any other use of JAX, "
        f"or --devices {needed} on the command line."
    )


def plan_unknown_key(key: str, known: Iterable[str], source: str) -> PlanError:
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return PlanError(
        f"{source}: {key!r} is not a field of a plan.{hint} The fields are {', '.join(known)}."
    )


def plan_not_toml(source: str, reason: str) -> PlanError:
    return PlanError(
        f"{source} is not a plan in TOML ({reason}). A plan looks like:\n\n"
        "    data = 4\n    microbatches = 8\n"
    )


def devices_already_started(wanted: int, have: int) -> PlanError:
    return PlanError(
        f"virtual_devices({wanted}) came too late: JAX already runs with {have} device(s) and "
        "cannot change their number. Call it before the first array, random key or "
        "jax.devices() of the process."
    )


# --- Tasks ------------------------------------------------------------------------------------


def loss_is_scalar(where: str, shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"{where} returned a value of shape {shape}; it must return one loss per example, "
        f"shape ({batch},), and leave every sum and mean to plurax: that is what makes uneven "
        "batches, microbatches and any number of devices give the same update. Two ways out:\n"
        "  1. remove the mean over the batch: return losses of shape (B,);\n"
        "  2. write the loss for one example and lift it: "
        "Task(loss=plurax.per_example(f)) with f(params, example, key) -> scalar.\n"
        "If the loss couples examples (contrastive, batch statistics), still return one loss per "
        "example and say Task(..., coupled=True)."
    )


def loss_wrong_shape(where: str, shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"{where} returned shape {shape}; it must be ({batch},), one number per example. "
        "Sum or average over the other dims (tokens, pixels) inside the loss, not over the batch."
    )


def loss_not_floating(where: str, dtype: str) -> TaskError:
    return TaskError(f"{where} returned dtype {dtype}; a loss must be floating point.")


def loss_wrong_structure(where: str, got: str, expected: str) -> TaskError:
    return TaskError(
        f"{where} returned {got}, which is not what a task returns; expected {expected}."
    )


def metric_name_taken(name: str, taken: Iterable[str]) -> TaskError:
    return TaskError(
        f"Task.loss returned a metric called {name!r}, which plurax reports itself; "
        f"choose another name than {', '.join(sorted(taken))}."
    )


def parameter_not_floating(path: str, dtype: str) -> TaskError:
    return TaskError(
        f"Task.init: the parameter {path!r} has dtype {dtype}, which has no gradient. Keep what is "
        "not trained out of params: close over it, or return it as model state "
        "(Task(..., stateful=True, coupled=True))."
    )


def stateful_needs_coupled() -> TaskError:
    return TaskError(
        "Task(stateful=True) needs coupled=True: a loss that writes model state (batch-norm "
        "statistics) makes examples depend on each other. With coupled=True it sees every example "
        "of a microbatch across all devices."
    )


def init_needs_model_state() -> TaskError:
    return TaskError(
        "Task(stateful=True): init(key) must return a pair (params, model_state); "
        "it returned something else."
    )


def model_state_changed(expected: str, given: str) -> TaskError:
    return TaskError(
        "Task.loss returned a model state of another structure or shape than it was given; it is "
        f"carried from step to step and must stay alike.\n  given:\n{expected}\n"
        f"  returned:\n{given}"
    )


def no_predict() -> TaskError:
    return TaskError(
        "this task has no predict function; give Task(predict=...) a function "
        "predict(params, inputs) -> outputs with leading dim B."
    )


def coupled_needs_evaluate() -> TaskError:
    return TaskError(
        "evaluate() averages over all examples, and the loss of a coupled task has no meaning for "
        "one example; give Task(evaluate=...) a function evaluate(params, batch) -> (B,) losses, "
        "or ((B,) losses, {name: (B,) metrics})."
    )


def predict_wrong_shape(shape: tuple[int, ...], batch: int) -> TaskError:
    return TaskError(
        f"Task.predict returned an array of shape {shape} for {batch} inputs; every output needs "
        f"the leading dim {batch}, one row per input."
    )


def per_example_not_scalar(shape: tuple[int, ...]) -> TaskError:
    return TaskError(
        f"per_example(f): f(params, example, key) returned shape {shape} for one example; "
        "it must return a scalar. Sum or average over the example's own dims inside f."
    )


# --- Batches and data -------------------------------------------------------------------------


def batch_is_empty() -> BatchError:
    return BatchError("the batch has no arrays, or no examples; a step needs at least one example.")


def batch_leaf_without_dim(path: str) -> BatchError:
    return BatchError(
        f"batch[{path}] is a scalar; every array of a batch needs the batch as its leading dim. "
        "Close over constants in the loss instead."
    )


def batch_uneven_leaves(sizes: dict[str, int]) -> BatchError:
    listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
    return BatchError(f"the arrays of a batch must have the same leading dim; given {listed}.")


def batch_too_large(given: int, compiled: int) -> BatchError:
    return BatchError(
        f"the batch has {given} examples and the program was compiled for at most {compiled}. "
        f"Split it, or compile with a batch of {given}; smaller batches need no new program."
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


def state_mismatch(expected: str, given: str) -> BatchError:
    return BatchError(
        f"the state does not belong to this program.\n  expected:\n{expected}\n  given:\n{given}"
    )


def state_elsewhere(given: str, wanted: str) -> BatchError:
    return BatchError(
        "the state lies on other devices than this program's plan puts it "
        f"({given}, where {wanted} is wanted). Move it first: state = program.place(state)."
    )


def data_needs_batch_size() -> BatchError:
    return BatchError(
        "fit(data=<arrays>) needs batch_size, the number of examples of a step; "
        "plurax.max_batch_size and plurax.fastest_batch_size can find one."
    )


def data_has_no_batches(why: str) -> BatchError:
    return BatchError(f"the data give no batch: {why}.")


def data_not_understood(kind: str) -> BatchError:
    return BatchError(
        f"data of type {kind} are not understood; give arrays in a tree (a dict of arrays with the "
        "same leading dim), a Grain dataset of batches, or an iterable of batches."
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


# --- Members and resampling -------------------------------------------------------------------


def members_none() -> MembersError:
    return MembersError("Members(seeds=...): a population needs at least one member.")


def members_not_counted() -> MembersError:
    return MembersError(
        "Members(...) does not say how many members there are; give seeds=100, or a list of "
        "seeds, or a list of values for a hyperparameter, or hyper=plurax.grid(...)."
    )


def member_not_there(number: int, count: int) -> MembersError:
    return MembersError(f"there is no member {number}: the members are 0 to {count - 1}.")


def member_seed_out_of_range(seed: object) -> MembersError:
    return MembersError(f"Members: the seed {seed!r} is not a whole number from 0 to 2**32 - 1.")


def hyper_wrong_length(name: str, given: int, members: int) -> MembersError:
    return MembersError(
        f"Members: the hyperparameter {name!r} has {given} values for {members} members; a list "
        "has one value for each member. For every combination of some values write "
        f"hyper=plurax.grid({name}=[...]), to draw from a range plurax.uniform(low, high)."
    )


def hyper_not_numbers(name: str, values: object) -> MembersError:
    return MembersError(
        f"Members: the hyperparameter {name!r} is {values!r}; inside one program it must be a "
        "number for each member. What changes shapes or code (a width, the name of an optimizer) "
        "goes into the shapes of plurax.sweep."
    )


def distribution_bounds(low: float, high: float, *, log: bool) -> MembersError:
    name, need = ("log_uniform", "0 < low < high") if log else ("uniform", "low < high")
    return MembersError(f"plurax.{name}({low}, {high}): needs {need}.")


def grid_not_a_list(name: str, values: object) -> MembersError:
    return MembersError(f"plurax.grid({name}={values!r}): give a list of at least one value.")


def folds_too_few(folds: int) -> MembersError:
    return MembersError(f"plurax.kfold({folds}): at least 2 folds are needed to leave one out.")


def folds_too_many(folds: int, rows: int) -> BatchError:
    return BatchError(f"plurax.kfold({folds}): the data have only {rows} rows; use fewer folds.")


def subsample_no_size(sizes: object) -> MembersError:
    return MembersError(
        f"plurax.subsample({sizes!r}): give sizes above 0: rows, or fractions below 1."
    )


def subsample_wrong_size(size: float, rows: int) -> BatchError:
    return BatchError(
        f"plurax.subsample: a size of {size} is not between 1 and the {rows} rows of the data."
    )


def plan_has_members(member: int) -> PlanError:
    return PlanError(
        f"Plan(member={member}) spreads the members of a population, and this is one network; "
        "give members=plurax.Members(...), or use data to spread the batch."
    )


def hyper_needs_a_value(what: str, reason: str) -> TaskError:
    return TaskError(
        f"{what}(hyper) asked for the value of a hyperparameter while the program was traced "
        f"({reason}). Every member has its own value, so it cannot decide what code runs: compute "
        "with it (jnp.where, jnp.minimum) instead of branching on it. A schedule is any function "
        "of the step: lambda step: hyper['learning_rate'] * jnp.minimum(1, step / hyper['warmup'])."
    )


def hyper_missing(what: str, name: str, known: Iterable[str]) -> TaskError:
    names = ", ".join(repr(one) for one in known) or "none"
    return TaskError(
        f"{what}(hyper) asked for the hyperparameter {name!r}, which Members(hyper=...) does not "
        f"give; it gives {names}."
    )


def members_need_a_function(what: str) -> MembersError:
    return MembersError(
        f"Members(hyper=...) gives hyperparameters, and neither the task nor the optimizer is a "
        f"function of them. Write the {what} as a function: "
        "def optimizer(hyper): return optax.adam(hyper['learning_rate'])."
    )


def members_differ() -> MembersError:
    return MembersError(
        "join_members: the states differ in structure, shape or dtype; only members of the same "
        "task and optimizer can be put together."
    )


def state_of_one_network() -> MembersError:
    return MembersError(
        "this is the state of one network, not of a population: its leaves have no leading dim of "
        "members."
    )


def members_not_grown(before: int, now: int) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {before} members and {now} are asked for, and they are not the same "
        "ones and more: seeds, hyperparameters and resampling of the first must stay as they were. "
        "Train another population in another output directory."
    )


def no_member_fits(budget: int, members: int, needed: int) -> MembersError:
    return MembersError(
        f"no population fits: the smallest possible, {members} member(s), needs {needed:,} bytes "
        f"on a device and the budget is {budget:,}. A smaller chunk and more microbatches need "
        "less memory."
    )


def sweep_no_metric(name: str, known: Iterable[str]) -> MembersError:
    return MembersError(f"there is no metric {name!r}; there are {', '.join(known)}.")


def sweep_all_frozen(count: int) -> MembersError:
    return MembersError(
        f"all {count} members of the sweep are frozen: loss or gradient was not finite in each. "
        "Smaller learning rates may help."
    )


def sweep_no_row(row: dict[str, object]) -> MembersError:
    return MembersError(f"this row is not of this sweep: {row}.")


def needs_pandas() -> MembersError:
    return MembersError(
        "to_pandas needs pandas: pip install pandas. Without it, rows is a list of dicts and "
        "save_csv writes a file."
    )


def halving_wrong_budget(first: int, epochs: int, reduction: int) -> MembersError:
    return MembersError(
        f"successive_halving(first={first}, epochs={epochs}, reduction={reduction}): needs "
        "1 <= first <= epochs and a reduction of at least 2."
    )


def halving_needs_arrays() -> MembersError:
    return MembersError(
        "successive_halving needs data that stay on the devices; give arrays, not an iterable of "
        "batches."
    )


def members_in_state(given: int, wanted: int) -> MembersError:
    return MembersError(
        f"the state holds {given} members and this program is compiled for {wanted}; take those "
        "you want (plurax.take_members) or compile for as many."
    )


def resample_needs_arrays(kind: str) -> MembersError:
    return MembersError(
        f"Members(resample={kind}) draws rows by number, and these data do not stay on the devices "
        "(an iterable of batches, or resident=False). Give the data as arrays, or leave resample "
        "out: then every member sees every batch."
    )


# --- Predicting with an ensemble --------------------------------------------------------------


def outputs_wrong_shape(what: str, shape: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the {what} have the shape {shape}; wanted are (members, examples, classes), as "
        "program.predict of a population returns them, or (examples, classes) of one network, "
        "none of them 0 and at least 2 classes. Fold other dims into the examples: "
        "x.reshape(members, -1, classes). Two classes from a single logit z are "
        "np.stack([0 * z, z], axis=-1)."
    )


def not_finite(what: str, place: list[int], members: list[int]) -> BatchError:
    listed = ", ".join(map(str, members[:10])) + (", ..." if len(members) > 10 else "")
    hint = f" They come from member(s) {listed}; leave these out." if members else ""
    return BatchError(f"the {what} hold NaN or infinite values, the first at {place}.{hint}")


def probabilities_wrong_shape(shape: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the probabilities have the shape {shape}; wanted are (examples, classes), with at least "
        "one example and 2 classes. Those of an ensemble are plurax.classify(logits).probabilities."
    )


def probabilities_not_normalized(where: str, example: int, total: float, low: float) -> BatchError:
    return BatchError(
        f"{where}example {example}: the probabilities sum to {total:.6g} and the lowest is "
        f"{low:.6g}; they must be at least 0 and sum to one. Logits become probabilities with "
        "plurax.classify(logits).probabilities."
    )


def labels_do_not_fit(shape: tuple[int, ...], dtype: str, examples: int) -> BatchError:
    return BatchError(
        f"the labels are {dtype} of shape {shape}; wanted are class numbers, whole numbers of "
        f"shape ({examples},), one for each example. One-hot labels become that with "
        "labels.argmax(axis=-1)."
    )


def label_out_of_range(label: int, place: int, classes: int) -> BatchError:
    return BatchError(
        f"labels[{place}] is {label}, and the {classes} classes are numbered 0 to {classes - 1}. "
        "Leave out examples without a label, and count classes from 0."
    )


def bins_not_positive(bins: object) -> BatchError:
    return BatchError(f"bins={bins!r}: give a whole number of bins, at least 1.")


def level_out_of_range(level: object) -> BatchError:
    return BatchError(
        f"level={level!r}: the share an interval should hold lies above 0 and below 1; "
        "for 90 % write level=0.9."
    )


def means_wrong_shape(shape: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the means have the shape {shape}; wanted are (members, examples, ...), as "
        "program.predict of a population returns them, none of them 0. For one network give "
        "means[None]."
    )


def variances_wrong_shape(given: tuple[int, ...], wanted: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the variances have the shape {given} and the means {wanted}; give a variance for each "
        "mean. One noise for all is np.full_like(means, variance)."
    )


def variance_negative(place: list[int], lowest: float) -> BatchError:
    return BatchError(
        f"the variances must be at least 0; the lowest is {lowest:.6g}, the first below 0 stands "
        f"at {place}. A network that predicts the log of a variance needs np.exp(outputs)."
    )


def targets_wrong_shape(given: tuple[int, ...], wanted: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the targets have the shape {given} and the predictions {wanted}; give one target for "
        f"each prediction, for example targets.reshape({wanted})."
    )


def picture_of_nothing(function: str, wanted: str) -> BatchError:
    return BatchError(f"{function} got nothing to draw; give at least one {wanted}.")


def panel_wrong_shape(name: str, shape: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"draw_confidence: the panel {name!r} has the shape {shape}; wanted are the probabilities "
        "of class 1 on a grid, (rows, columns) with at least 2 of each: "
        "probabilities[:, 1].reshape(rows, columns)."
    )


def points_do_not_fit(
    points: tuple[int, ...], labels: tuple[int, ...], values: list[object]
) -> BatchError:
    return BatchError(
        f"draw_confidence: the points have the shape {points}, the labels the shape {labels} and "
        f"the values {values}; wanted are points (N, 2), the coordinates x and y, and a label 0 "
        "or 1 for each, (N,)."
    )


# --- Checkpoints ------------------------------------------------------------------------------


def checkpoint_none(directory: str) -> CheckpointError:
    return CheckpointError(f"{directory} holds no checkpoint; train with this directory first.")


def checkpoint_all_damaged(directory: str, reasons: Iterable[str]) -> CheckpointError:
    listed = "\n".join(f"  - {reason}" for reason in reasons)
    return CheckpointError(
        f"no checkpoint in {directory} can be restored, and training does not silently start "
        f"from scratch:\n{listed}\nMove the directory away to start anew."
    )


def checkpoint_mismatch(directory: str, expected: str, given: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint in {directory} was written by another task or optimizer.\n"
        f"  the program holds:\n{expected}\n  the checkpoint holds:\n{given}\n"
        "Use another directory, or the task and optimizer it was written with."
    )


def checkpoint_other_run(directory: str, field: str, saved: object, now: object) -> CheckpointError:
    return CheckpointError(
        f"the run saved in {directory} has {field}={saved!r} and this one {field}={now!r}; "
        "continuing would not be the same training. Use the same value, or another directory."
    )


def output_has_run(directory: str, step: int) -> CheckpointError:
    return CheckpointError(
        f"{directory} already holds a run, saved at step {step}. To continue it, say resume=True "
        "(--resume on the command line); to start anew, choose another output directory."
    )


def checkpoint_not_written(directory: str, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint could not be written to {directory}: {reason}")


# --- Experiments ------------------------------------------------------------------------------


def experiment_missing_file(path: str) -> ExperimentError:
    return ExperimentError(f"{path}: no such file; give a Python file that defines experiment().")


def experiment_missing_function(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} does not define experiment(). Add:\n\n"
        "    def experiment():\n"
        "        return plurax.Experiment(task=..., optimizer=..., data=..., "
        "batch_size=..., epochs=...)\n"
    )


def experiment_wrong_type(path: str, kind: str) -> ExperimentError:
    return ExperimentError(
        f"{path}: experiment() returned {kind}; it must return plurax.Experiment(...)."
    )


def experiment_failed(path: str, reason: str) -> ExperimentError:
    return ExperimentError(f"{path} could not be loaded: {reason}")


def unknown_command(given: str, known: Iterable[str]) -> ExperimentError:
    return ExperimentError(
        f"{given!r} is not a command; the commands are {', '.join(known)}. "
        "plurax --help explains them."
    )


def no_experiment_file(command: str, asked_help: bool) -> ExperimentError:
    want = f"plurax {command} FILE" + (" --help" if asked_help else "")
    why = "the options and their defaults depend on it" if asked_help else "it comes first"
    return ExperimentError(
        f"name the experiment file: {want} ({why}). "
        "FILE is Python that defines experiment(); plurax --help shows an example."
    )


def devices_not_understood(value: str) -> PlanError:
    return PlanError(
        f"--devices {value}: give a number of virtual CPU devices, or 'cores' for one per core."
    )


def inputs_not_found(path: str) -> BatchError:
    return BatchError(f"{path}: no such file; --inputs wants a .npy or .npz file.")


def inputs_not_arrays(path: str, reason: str) -> BatchError:
    return BatchError(f"{path} is not a .npy or .npz file of plain arrays: {reason}")


def missing_extra(package: str, extra: str) -> ImportError:
    return ImportError(f"{package} is not installed; pip install 'plurax[{extra}]' brings it.")
