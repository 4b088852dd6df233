"""Combine an ensemble's predictions: its mean, its confidence, and its members' disagreement.

The functions take the arrays that `program.predict` of a population returns: leading dims members
`K`, examples `N`. All sums are in float64, on the host; entropies and log losses are in nats.

The mean of the members' predictions is the prediction of a *deep ensemble* (B. Lakshminarayanan,
A. Pritzel, C. Blundell, NeurIPS 2017). Its uncertainty has two parts (S. Depeweg et al., ICML
2018): aleatoric, the mean uncertainty of the members (noise in the data), and epistemic, the
members' disagreement (too few data; more data of that kind would reduce it).

    classification    H[mean of p_k]  =  mean of H[p_k]  +  mutual information of class and member
    regression        total variance  =  mean of the members' variances  +  variance of their means

Example, K = 2 members, N = 2 examples, C = 2 classes, probabilities `(2, 2, 2)`:

                   member 0      member 1      mean          entropy  aleatoric  epistemic
    example 0      0.5  0.5      0.5  0.5      0.5  0.5      0.693    0.693      0      both unsure
    example 1      1.0  0.0      0.0  1.0      0.5  0.5      0.693    0          0.693  they differ
"""

import dataclasses
import statistics

import numpy as np
from jaxtyping import Bool, Float, Int

from plurax import errors
from plurax.metrics.classification import MOST_BINS
from plurax.validate import whole_number

NORMALIZED = 1e-2
"""The largest deviation from one of a sum of probabilities: that of a softmax in bfloat16."""


@dataclasses.dataclass(frozen=True, eq=False)
class Classification:
    """An ensemble's prediction for `N` examples and `C` classes; all float64.

    **Fields:**

    - `probabilities`, `(N, C)`: the mean of the members' probabilities.
    - `variance`, `(N, C)`: of the members' probabilities around that mean (divided by `K`).
    - `votes`, `(N, C)`: the share of members for which the class is the likeliest.
    - `entropy`, `(N,)`: of `probabilities`, in nats: the total uncertainty, 0 to log C.
    - `aleatoric`, `(N,)`: the mean entropy of the members.
    - `epistemic`, `(N,)`: `entropy - aleatoric`, the mutual information of class and member: at
      least 0, and 0 where all members agree.
    """

    probabilities: Float[np.ndarray, "N C"]
    variance: Float[np.ndarray, "N C"]
    votes: Float[np.ndarray, "N C"]
    entropy: Float[np.ndarray, "N"]
    aleatoric: Float[np.ndarray, "N"]
    epistemic: Float[np.ndarray, "N"]

    @property
    def label(self) -> Int[np.ndarray, "N"]:
        """The likeliest class of each example, by the mean; the first among equals."""
        return self.probabilities.argmax(axis=-1)


def combine_classification(
    outputs: Float[np.ndarray, "*K N C"], *, from_logits: bool = True
) -> Classification:
    """Combine the members' classifications.

    **Arguments:**

    - `outputs`: logits `(K, N, C)`; `(N, C)`, of one network, are an ensemble of one.
    - `from_logits`: False where `outputs` are probabilities already.

    Members are read one after the other: besides its input this holds a few `(N, C)` arrays.

    Raises `BatchError` for other shapes, for values that are not finite, and for probabilities
    that do not sum to one.

    >>> import numpy as np
    >>> unsure, torn = [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]
    >>> probabilities = np.stack([unsure, torn], axis=1)  # (members, 2, 2)
    >>> said = combine_classification(probabilities, from_logits=False)
    >>> said.entropy.round(3), said.aleatoric.round(3), said.epistemic.round(3)
    (array([0.693, 0.693]), array([0.693, 0.   ]), array([0.   , 0.693]))
    """
    members = _members(outputs, "logits" if from_logits else "probabilities")
    count, examples, classes = members.shape
    mean, squares, votes = (np.zeros((examples, classes)) for _ in range(3))
    aleatoric = np.zeros(examples)
    for index, member in enumerate(members):
        shares = np.exp(_log_softmax(member)) if from_logits else np.asarray(member, np.float64)
        if not from_logits:
            _check_normalized(shares, f"member {index}, ")
        # Welford's update: subtracting a squared sum from a sum of squares would lose small
        # variances.
        away = shares - mean
        mean += away / (index + 1)
        squares += away * (shares - mean)
        votes[np.arange(examples), shares.argmax(axis=-1)] += 1
        aleatoric += (_entropy(shares) - aleatoric) / (index + 1)
    entropy = _entropy(mean)
    return Classification(
        probabilities=mean,
        variance=squares / count,
        votes=votes / count,
        entropy=entropy,
        aleatoric=aleatoric,
        epistemic=np.maximum(entropy - aleatoric, 0.0),  # below 0 by rounding only
    )


def accuracy(probabilities: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the share of examples whose likeliest class is their label.

    **Arguments:** as for `nll`.

    >>> import numpy as np
    >>> accuracy(np.array([[0.9, 0.1], [0.6, 0.4]]), np.array([0, 1]))
    0.5
    """
    shares, labels = _scored(probabilities, labels)
    return float((shares.argmax(axis=-1) == labels).mean())


def nll(probabilities: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the mean negative log likelihood of the labels, in nats: the log loss.

    It is infinite where a label has probability 0.

    **Arguments:**

    - `probabilities`: `(N, C)`, of an ensemble `combine_classification(logits).probabilities`.
    - `labels`: class numbers, `(N,)`, whole numbers from 0 to C - 1.

    Raises `BatchError` where shapes do not agree or probabilities do not sum to one.

    >>> import numpy as np
    >>> round(nll(np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([0, 0])), 3)  # 1.5 log 2
    1.04
    """
    shares, labels = _scored(probabilities, labels)
    with np.errstate(divide="ignore"):
        return float(-np.log(shares[np.arange(len(labels)), labels]).mean())


def brier(probabilities: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the Brier score: the mean over examples of Σ_c (p_c - [c is the label])².

    The form of G. W. Brier (Monthly Weather Review 78, 1950), summed over the classes: from 0 to
    2. For two classes it is twice the squared error of one probability.

    **Arguments:** as for `nll`.

    >>> import numpy as np
    >>> brier(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 0]))
    0.25
    """
    shares, labels = _scored(probabilities, labels)
    hit = shares[np.arange(len(labels)), labels]
    return float(((shares**2).sum(axis=-1) - 2 * hit + 1).mean())


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """How often predictions of a given confidence are right, in `M` bins of equal width.

    **Fields:**

    - `confidence`, `(M,)`: the mean probability of the likeliest class, over a bin's examples.
    - `accuracy`, `(M,)`: the share of them that are right. Both are NaN for an empty bin.
    - `count`, `(M,)`: the number of examples; bin `m` holds confidences above m/M, up to (m+1)/M.
    - `error`: the expected calibration error, Σ count/N · |accuracy - confidence|.
    """

    confidence: Float[np.ndarray, "M"]
    accuracy: Float[np.ndarray, "M"]
    count: Int[np.ndarray, "M"]
    error: float


def calibration(
    probabilities: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], bins: int = 15
) -> Calibration:
    """Compare confidence with accuracy (C. Guo, G. Pleiss, Y. Sun, K. Weinberger, ICML 2017).

    The error depends on the bins, and is above 0 for few examples even where the model is right:
    compare values of the same bins and the same examples only.

    **Arguments:** as for `nll`; `bins`, a whole number of at least 1.

    Raises `BatchError` as `nll` does, and for other `bins`.

    >>> import numpy as np
    >>> said = calibration(np.array([[0.8, 0.2]] * 4), np.array([0, 0, 0, 1]), bins=2)
    >>> said.confidence, said.accuracy, said.count, round(said.error, 3)
    (array([nan, 0.8]), array([ nan, 0.75]), array([0, 4]), 0.05)
    """
    if whole_number(bins) is None or bins > MOST_BINS:
        raise errors.BatchError(
            f"bins={bins!r}: give a whole number of bins, at least 1 and at most {MOST_BINS:,}."
        )
    shares, labels = _scored(probabilities, labels)
    confidence = shares.max(axis=-1)
    right = shares.argmax(axis=-1) == labels
    # Bins are closed above: a confidence of exactly (m+1)/M belongs to bin m.
    bin_index = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    count = np.bincount(bin_index, minlength=bins)
    confidences = np.bincount(bin_index, weights=confidence, minlength=bins)
    rights = np.bincount(bin_index, weights=right, minlength=bins)
    divisor = np.where(count > 0, count, np.nan)
    return Calibration(
        confidence=confidences / divisor,
        accuracy=rights / divisor,
        count=count,
        error=float(np.abs(rights - confidences).sum() / len(labels)),
    )


def fit_temperature(logits: Float[np.ndarray, "*K N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the temperature `T` for which the mean of softmax(logits / T) has the least `nll`.

    C. Guo et al., ICML 2017, for one network; in an ensemble every member's logits are divided by
    the same temperature before the probabilities are averaged. A value above 1 means that the
    logits were too confident. Fit it on examples that were not trained on, then use
    `combine_classification(other_logits / T)`.

    **Arguments:** `logits`, `(K, N, C)` or, of one network, `(N, C)`; `labels` as for `nll`.

    **Returns:** a value from 1/128 to 128; near the lower end where every example is right, since
    the loss then falls for ever.

    Raises `BatchError` as `combine_classification` and `nll` do.

    >>> import numpy as np
    >>> logits = np.tile([[np.log(4.0), 0.0]], (3, 1))  # says 4 to 1 and is right 2 to 1
    >>> round(fit_temperature(logits, np.array([0, 0, 1])), 3)
    2.0
    """
    from scipy.optimize import minimize_scalar  # slow to import

    members = _members(logits, "logits")
    labels = _labels(labels, *members.shape[1:])
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        scale = np.exp(-log_temperature)
        # The log of the members' mean probability of the label, summed in log space.
        likely = np.full(len(labels), -np.inf)
        for member in members:
            scaled = np.asarray(member, np.float64) * scale
            likely = np.logaddexp(likely, _log_softmax(scaled)[rows, labels])
        return float(np.log(len(members)) - likely.mean())

    # An ensemble's loss may have several minima: a coarse grid finds the neighbourhood of the
    # lowest.
    coarse = np.log(2.0) * np.arange(-7, 8)
    best = int(np.argmin([loss(value) for value in coarse]))
    bounds = coarse[max(best - 1, 0)], coarse[min(best + 1, len(coarse) - 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-7})
    return float(np.exp(found.x))


@dataclasses.dataclass(frozen=True, eq=False)
class Regression:
    """An ensemble's prediction for `N` examples; all float64, in the shape of one member's outputs.

    **Fields:**

    - `mean`, `(N, ...)`: of the members' means.
    - `variance`, `(N, ...)`: the total, `aleatoric + epistemic`.
    - `aleatoric`, `(N, ...)`: the mean of the members' variances; 0 without variances.
    - `epistemic`, `(N, ...)`: the variance of the members' means (divided by `K`).
    - `members`, `(K, N, ...)`: the members' means.
    """

    mean: Float[np.ndarray, "N ..."]
    variance: Float[np.ndarray, "N ..."]
    aleatoric: Float[np.ndarray, "N ..."]
    epistemic: Float[np.ndarray, "N ..."]
    members: Float[np.ndarray, "K N ..."]

    def interval(
        self, level: float = 0.9
    ) -> tuple[Float[np.ndarray, "N ..."], Float[np.ndarray, "N ..."]]:
        """Return `(low, high)` around `level` of a Gaussian with this mean and total variance.

        Without the members' variances it covers their disagreement and no noise: an interval for
        the function, too narrow for new targets. Raises `BatchError` for a level outside (0, 1).
        """
        width = statistics.NormalDist().inv_cdf((1 + _level(level)) / 2) * np.sqrt(self.variance)
        return self.mean - width, self.mean + width

    def quantile_interval(
        self, level: float = 0.9
    ) -> tuple[Float[np.ndarray, "N ..."], Float[np.ndarray, "N ..."]]:
        """Return `(low, high)` around the middle `level` of the members' means, without noise.

        It assumes no Gaussian. Raises `BatchError` for a level outside (0, 1).
        """
        tail = (1 - _level(level)) / 2
        low, high = np.quantile(self.members, [tail, 1 - tail], axis=0)
        return low, high

    def coverage(self, targets: Float[np.ndarray, "N ..."], level: float = 0.9) -> float:
        """Return the share of targets inside `interval(level)`, ends included.

        It is near `level` for a calibrated ensemble. Raises `BatchError` for targets of another
        shape than `mean`.
        """
        low, high = self.interval(level)
        targets = np.asarray(targets, np.float64)
        if targets.shape != self.mean.shape:
            raise errors.BatchError(
                f"the targets have the shape {targets.shape} and the predictions "
                f"{self.mean.shape}; give one target for each prediction, for example "
                f"targets.reshape({self.mean.shape})."
            )
        _check_finite(targets, "targets")
        return float(((low <= targets) & (targets <= high)).mean())


def combine_regression(
    means: Float[np.ndarray, "K N ..."], variances: Float[np.ndarray, "K N ..."] | None = None
) -> Regression:
    """Combine the members' regressions: mean and variance of their equal mixture.

    **Arguments:**

    - `means`: `(K, N, ...)`, each member's prediction; of one network, `means[None]`.
    - `variances`: of the same shape, at least 0: the variance each member predicts, if it does.

    Raises `BatchError` for other shapes, negative variances, and values that are not finite.

    >>> import numpy as np
    >>> said = combine_regression(np.array([[1.0], [3.0]]), np.array([[0.5], [1.5]]))
    >>> said.mean, said.aleatoric, said.epistemic, said.variance
    (array([2.]), array([1.]), array([1.]), array([2.]))
    """
    members = np.asarray(means, np.float64)
    if members.ndim < 2 or 0 in members.shape:
        raise errors.BatchError(
            f"the means have the shape {members.shape}; the shape must be (members, examples, "
            "...), as program.predict of a population returns it, with no dim of size 0. For one "
            "network give means[None]."
        )
    _check_finite(members, "means", by_member=True)
    mean, epistemic = members.mean(axis=0), members.var(axis=0)
    aleatoric = np.zeros_like(mean)
    if variances is not None:
        own = np.asarray(variances, np.float64)
        if own.shape != members.shape:
            raise errors.BatchError(
                f"the variances have the shape {own.shape} and the means {members.shape}; give a "
                "variance for each mean. One noise for all is np.full_like(means, variance)."
            )
        _check_finite(own, "variances", by_member=True)
        if own.min() < 0:
            raise errors.BatchError(
                f"the variances must be at least 0; the lowest is {float(own.min()):.6g}, the "
                f"first below 0 is at {_first(own < 0)}. A network that predicts the log of a "
                "variance needs np.exp(outputs)."
            )
        aleatoric = own.mean(axis=0)
    return Regression(mean, aleatoric + epistemic, aleatoric, epistemic, members)


def _log_softmax(logits: Float[np.ndarray, "N C"]) -> Float[np.ndarray, "N C"]:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _entropy(shares: Float[np.ndarray, "N C"]) -> Float[np.ndarray, "N"]:
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.abs((shares * logs).sum(axis=-1))  # abs: no -0.0


def _members(outputs: Float[np.ndarray, "*K N C"], what: str) -> Float[np.ndarray, "K N C"]:
    """Check outputs; return them with a dim of members `(K, N, C)`, in the dtype given."""
    outputs = np.asarray(outputs)
    members = outputs[None] if outputs.ndim == 2 else outputs
    if members.ndim != 3 or 0 in members.shape or members.shape[-1] < 2:
        raise errors.BatchError(
            f"the {what} have the shape {outputs.shape}; the shape must be (members, examples, "
            "classes), as program.predict of a population returns it, or (examples, classes) of "
            "one network, with no dim of size 0 and at least 2 classes. Fold other dims into the "
            "examples: x.reshape(members, -1, classes). Two classes from a single logit z are "
            "np.stack([0 * z, z], axis=-1)."
        )
    _check_finite(outputs, what, by_member=outputs.ndim == 3)
    return members


def _scored(
    probabilities: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]
) -> tuple[Float[np.ndarray, "N C"], Int[np.ndarray, "N"]]:
    """Check and return the arguments of a score."""
    shares = np.asarray(probabilities, np.float64)
    if shares.ndim != 2 or 0 in shares.shape or shares.shape[1] < 2:
        raise errors.BatchError(
            f"the probabilities have the shape {shares.shape}; the shape must be (examples, "
            "classes), with at least one example and 2 classes. Those of an ensemble are "
            "plurax.ensemble.combine_classification(logits).probabilities."
        )
    _check_finite(shares, "probabilities")
    _check_normalized(shares, "")
    return shares, _labels(labels, *shares.shape)


def _labels(labels: Int[np.ndarray, "N"], examples: int, classes: int) -> Int[np.ndarray, "N"]:
    labels = np.asarray(labels)
    if labels.shape != (examples,) or not np.issubdtype(labels.dtype, np.integer):
        raise errors.BatchError(
            f"the labels are {labels.dtype.name} of shape {labels.shape}; they must be class "
            f"indices, integers of shape ({examples},), one for each example. One-hot labels "
            "become that with labels.argmax(axis=-1)."
        )
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        index = int(wrong.argmax())
        raise errors.BatchError(
            f"labels[{index}] is {int(labels[index])}, and the {classes} classes are numbered 0 to "
            f"{classes - 1}. Leave out examples without a label, and count classes from 0."
        )
    return labels


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise errors.BatchError(
            f"level={level!r}: the level of an interval must be above 0 and below 1; for 90 % "
            "write level=0.9."
        )
    return level


def _check_normalized(shares: Float[np.ndarray, "N C"], where: str) -> None:
    total = shares.sum(axis=-1)
    wrong = (np.abs(total - 1) > NORMALIZED) | (shares < 0).any(axis=-1)
    if wrong.any():
        index = int(wrong.argmax())
        low = float(shares[index].min())
        raise errors.BatchError(
            f"{where}example {index}: the probabilities sum to {float(total[index]):.6g} and the "
            f"lowest is {low:.6g}; they must be at least 0 and sum to one. Logits become "
            "probabilities with plurax.ensemble.combine_classification(logits).probabilities."
        )


def _check_finite(values: Float[np.ndarray, "..."], what: str, by_member: bool = False) -> None:
    wrong = ~np.isfinite(values)
    if wrong.any():
        members = wrong.reshape(len(wrong), -1).any(axis=1).nonzero()[0].tolist()
        listed = ", ".join(map(str, members[:10])) + (", ..." if len(members) > 10 else "")
        hint = f" They come from member(s) {listed}; leave these out." if by_member else ""
        raise errors.BatchError(
            f"the {what} hold NaN or infinite values, the first at {_first(wrong)}.{hint}"
        )


def _first(wrong: Bool[np.ndarray, "..."]) -> list[int]:
    """Return the index of the first True."""
    return [int(at) for at in np.unravel_index(int(wrong.argmax()), wrong.shape)]
