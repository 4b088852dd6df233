"""Predictions that cannot be put together, scored or drawn."""

from plurax.errors.kinds import BatchError


def outputs_wrong_shape(what: str, shape: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the {what} have the shape {shape}; the shape must be (members, examples, classes), as "
        "program.predict of a population returns it, or (examples, classes) of one network, with "
        "no dim of size 0 and at least 2 classes. Fold other dims into the examples: "
        "x.reshape(members, -1, classes). Two classes from a single logit z are "
        "np.stack([0 * z, z], axis=-1)."
    )


def not_finite(what: str, place: list[int], members: list[int]) -> BatchError:
    listed = ", ".join(map(str, members[:10])) + (", ..." if len(members) > 10 else "")
    hint = f" They come from member(s) {listed}; leave these out." if members else ""
    return BatchError(f"the {what} hold NaN or infinite values, the first at {place}.{hint}")


def probabilities_wrong_shape(shape: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the probabilities have the shape {shape}; the shape must be (examples, classes), with at "
        "least one example and 2 classes. Those of an ensemble are "
        "plurax.ensemble.combine_classification(logits).probabilities."
    )


def probabilities_not_normalized(where: str, example: int, total: float, low: float) -> BatchError:
    return BatchError(
        f"{where}example {example}: the probabilities sum to {total:.6g} and the lowest is "
        f"{low:.6g}; they must be at least 0 and sum to one. Logits become probabilities with "
        "plurax.ensemble.combine_classification(logits).probabilities."
    )


def labels_do_not_fit(shape: tuple[int, ...], dtype: str, examples: int) -> BatchError:
    return BatchError(
        f"the labels are {dtype} of shape {shape}; they must be class indices, integers of "
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
        f"level={level!r}: the level of an interval must be above 0 and below 1; "
        "for 90 % write level=0.9."
    )


def means_wrong_shape(shape: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the means have the shape {shape}; the shape must be (members, examples, ...), as "
        "program.predict of a population returns it, with no dim of size 0. For one network give "
        "means[None]."
    )


def variances_wrong_shape(given: tuple[int, ...], wanted: tuple[int, ...]) -> BatchError:
    return BatchError(
        f"the variances have the shape {given} and the means {wanted}; give a variance for each "
        "mean. One noise for all is np.full_like(means, variance)."
    )


def variance_negative(place: list[int], lowest: float) -> BatchError:
    return BatchError(
        f"the variances must be at least 0; the lowest is {lowest:.6g}, the first below 0 is "
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
        f"draw_confidence: the panel {name!r} has the shape {shape}; it must hold the "
        "probabilities of class 1 on a grid, (rows, columns), with at least 2 of each: "
        "probabilities[:, 1].reshape(rows, columns)."
    )


def points_do_not_fit(
    points: tuple[int, ...], labels: tuple[int, ...], values: list[object]
) -> BatchError:
    return BatchError(
        f"draw_confidence: the points have the shape {points}, the labels the shape {labels} and "
        f"the values {values}; the points must be (N, 2), the coordinates x and y, and the labels "
        "(N,), 0 or 1."
    )
