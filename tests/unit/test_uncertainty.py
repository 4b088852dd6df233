"""Uncertainty against independent formulas and scikit-learn; its properties; errors; pictures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.draws import draws

from plurax.ensemble.uncertainty import (
    accuracy,
    brier,
    calibration,
    combine_classification,
    combine_regression,
    fit_temperature,
    nll,
)
from plurax.errors import BatchError
from plurax.report.calibration_picture import _intervals, draw_confidence, draw_reliability

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4))
VALUES = st.floats(-300, 300, width=32)
LOGITS = SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=VALUES))
PNG = b"\x89PNG"


def softmax(logits):
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def made(members=4, examples=200, classes=3, seed=0, scale=1.0):
    """Logits of members near the truth, and labels drawn from the truth."""
    rng = np.random.default_rng(seed)
    true = 2 * rng.normal(size=(examples, classes))
    labels = (true + rng.gumbel(size=true.shape)).argmax(axis=-1)
    return scale * (true + 0.5 * rng.normal(size=(members, *true.shape))), labels


# --- Classification


def test_classification_against_the_formulas():
    logits, _ = made()
    said = combine_classification(logits.astype(np.float32))
    p = softmax(logits.astype(np.float32).astype(np.float64))
    mean = p.mean(axis=0)
    np.testing.assert_allclose(said.probabilities, mean, rtol=1e-12)
    np.testing.assert_allclose(said.variance, p.var(axis=0), rtol=1e-9, atol=1e-15)
    votes = np.stack([(p.argmax(axis=-1) == c).mean(axis=0) for c in range(3)], axis=-1)
    np.testing.assert_array_equal(said.votes, votes)
    np.testing.assert_allclose(said.entropy, -(mean * np.log(mean)).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(said.aleatoric, -(p * np.log(p)).sum(-1).mean(0), rtol=1e-12)
    # mutual information as the mean divergence of the members from the mean
    divergence = (p * np.log(p / mean)).sum(axis=-1).mean(axis=0)
    np.testing.assert_allclose(said.epistemic, divergence, rtol=1e-8, atol=1e-14)
    np.testing.assert_array_equal(said.label, mean.argmax(axis=-1))
    assert {field.dtype for field in vars(said).values()} == {np.dtype(np.float64)}


@draws(60)
@given(LOGITS)
def test_classification_has_its_properties(logits):
    said = combine_classification(logits)
    classes = logits.shape[-1]
    np.testing.assert_allclose(said.probabilities.sum(axis=-1), 1)
    np.testing.assert_allclose(said.votes.sum(axis=-1), 1)
    np.testing.assert_allclose(said.entropy, said.aleatoric + said.epistemic, atol=1e-12)
    assert said.epistemic.min() >= 0
    assert said.aleatoric.min() >= 0
    assert said.entropy.max() <= math.log(classes) + 1e-12
    assert said.variance.min() >= 0
    assert said.variance.max() <= 0.25 + 1e-12

    other = combine_classification(logits[::-1])
    for name, values in vars(said).items():
        np.testing.assert_allclose(getattr(other, name), values, atol=1e-12, err_msg=name)
    again = combine_classification(softmax(logits.astype(np.float64)), from_logits=False)
    for name in ("probabilities", "variance", "entropy", "aleatoric", "epistemic"):
        np.testing.assert_allclose(getattr(again, name), getattr(said, name), atol=1e-12)
    alike = combine_classification(np.stack([logits[0]] * 3))
    np.testing.assert_allclose(alike.epistemic, 0, atol=1e-12)
    np.testing.assert_allclose(alike.variance, 0, atol=1e-24)


def test_one_network_is_an_ensemble_of_one():
    logits, _ = made(members=1)
    one, ensemble = combine_classification(logits[0]), combine_classification(logits)
    for name, values in vars(ensemble).items():
        np.testing.assert_array_equal(getattr(one, name), values)
    assert one.epistemic.max() == one.variance.max() == 0


def test_probabilities_in_low_precision_are_taken():
    import jax.numpy as jnp

    logits, labels = made()
    low = np.asarray(jnp.asarray(softmax(logits), jnp.bfloat16).astype(jnp.float32))
    said = combine_classification(low, from_logits=False)
    assert nll(said.probabilities, labels) == pytest.approx(
        nll(combine_classification(logits).probabilities, labels), rel=0.01
    )


# --- Scores


def test_scores_agree_with_scikit_learn():
    from sklearn.metrics import brier_score_loss, log_loss  # takes seconds, see test_metrics.py

    logits, labels = made(examples=300)
    p = combine_classification(logits).probabilities
    assert nll(p, labels) == pytest.approx(log_loss(labels, p), rel=1e-9)
    wanted = brier_score_loss(labels, p, labels=range(3), scale_by_half=False)
    assert brier(p, labels) == pytest.approx(wanted, rel=1e-9)
    assert accuracy(p, labels) == (p.argmax(axis=-1) == labels).mean()
    sure_and_wrong = np.array([[1.0, 0.0]]), np.array([1])
    assert nll(*sure_and_wrong) == math.inf
    assert brier(*sure_and_wrong) == 2


def test_calibration_agrees_with_scikit_learn():
    from sklearn.calibration import calibration_curve

    logits, labels = made(examples=500)
    p = combine_classification(logits).probabilities
    said = calibration(p, labels, bins=10)
    right = p.argmax(axis=-1) == labels
    share, confidence = calibration_curve(right, p.max(axis=-1), n_bins=10)
    full = said.count > 0
    np.testing.assert_allclose(said.accuracy[full], share)
    np.testing.assert_allclose(said.confidence[full], confidence)
    assert said.count.sum() == 500
    assert np.isnan(said.accuracy[~full]).all()
    assert said.error == pytest.approx(
        (said.count[full] * np.abs(share - confidence)).sum() / 500, rel=1e-9
    )


@given(st.permutations([(7, 10), (9, 10), (3, 5), (1, 1)]), st.integers(1, 20))
def test_perfect_calibration_has_no_error(groups, bins):
    """Of `n` examples said to be right with confidence r/n, r are."""
    p = np.concatenate([[[r / n, 1 - r / n]] * n for r, n in groups])
    labels = np.concatenate([[0] * r + [1] * (n - r) for r, n in groups])
    said = calibration(p, labels, bins)
    assert said.error == pytest.approx(0, abs=1e-12)
    assert calibration(p, 1 - labels, bins).error > 0.3


def test_the_bins_hold_their_upper_ends():
    p = np.array([[0.5, 0.5], [0.75, 0.25], [0.751, 0.249], [1.0, 0.0]])
    assert calibration(p, np.zeros(4, int), bins=4).count.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("members", [1, 3])
def test_the_temperature_recovers_a_scale(members, scale):
    logits, labels = made(members=members, examples=400, seed=1)
    before = fit_temperature(logits, labels)
    found = fit_temperature(scale * logits, labels)
    assert found == pytest.approx(scale * before, rel=1e-4)
    # no other temperature is better, to the outside the mean of the softened members
    best = nll(combine_classification(scale * logits / found).probabilities, labels)
    for factor in (0.2, 0.98, 1.02, 5):
        assert (
            nll(combine_classification(scale * logits / (factor * found)).probabilities, labels)
            > best
        )


def test_the_temperature_of_the_truth_is_one():
    rng = np.random.default_rng(0)
    true = 2 * rng.normal(size=(20_000, 3))
    labels = (true + rng.gumbel(size=true.shape)).argmax(axis=-1)
    assert fit_temperature(4 * true, labels) == pytest.approx(4, rel=0.05)


def test_the_temperature_of_labels_that_are_all_right_stays_in_range():
    assert 1 / 128 <= fit_temperature(np.array([[1.0, 0.0]]), np.array([0])) < 1 / 64


# --- Regression


def test_regression_is_the_mixture_of_the_members():
    rng = np.random.default_rng(0)
    means, variances = rng.normal(size=(3, 5, 2)), rng.uniform(0.1, 1, size=(3, 5, 2))
    said = combine_regression(means, variances)
    second = (variances + means**2).mean(axis=0)  # E[y²]
    np.testing.assert_allclose(said.mean, means.sum(axis=0) / 3)
    np.testing.assert_allclose(said.variance, second - said.mean**2)
    np.testing.assert_allclose(said.epistemic, ((means - said.mean) ** 2).sum(axis=0) / 3)
    np.testing.assert_allclose(said.aleatoric, variances.sum(axis=0) / 3)
    draws = means[:, None] + np.sqrt(variances)[:, None] * rng.normal(size=(3, 20_000, 5, 2))
    np.testing.assert_allclose(said.variance, draws.var(axis=(0, 1)), rtol=0.1)
    alone = combine_regression(means)
    np.testing.assert_array_equal(alone.aleatoric, 0)
    np.testing.assert_array_equal(alone.variance, alone.epistemic)


@draws(40)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 4)), elements=VALUES),
    st.floats(0.01, 0.99),
)
def test_intervals_hold_the_mean_and_grow_with_the_level(means, level):
    said = combine_regression(means)
    low, high = said.interval(level)
    wide_low, wide_high = said.interval((1 + level) / 2)
    assert (wide_low <= low).all()
    assert (low <= said.mean).all()
    assert (high <= wide_high).all()
    low, high = said.quantile_interval(level)
    assert (means.min(axis=0) <= low).all()
    assert (low <= high).all()
    assert (high <= means.max(axis=0)).all()
    np.testing.assert_allclose(combine_regression(means[::-1]).variance, said.variance, atol=1e-9)


def test_a_gaussian_is_covered_as_often_as_said():
    rng = np.random.default_rng(0)
    said = combine_regression(np.zeros((2, 20_000)), np.full((2, 20_000), 4.0))
    targets = 2 * rng.normal(size=20_000)
    for level in (0.5, 0.9, 0.99):
        assert said.coverage(targets, level) == pytest.approx(level, abs=0.01)
    low, high = said.interval(0.95)
    assert high[0] == -low[0] == pytest.approx(2 * 1.959964, rel=1e-6)
    assert said.coverage(targets) == said.coverage(targets, 0.9)


def test_quantiles_are_those_of_the_members():
    low, high = combine_regression(np.arange(101.0)[:, None]).quantile_interval(0.9)
    assert (low, high) == (pytest.approx(5), pytest.approx(95))


# --- Errors

P, L = np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([0, 1])
BAD = np.zeros((4, 2, 3))
BAD[[1, 3], 1, 2] = np.nan
SAID = combine_regression(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: combine_classification(np.zeros(3)),
         r"the logits have the shape \(3,\); the shape must be \(members,"),
        (lambda: combine_classification(np.zeros((2, 3, 1))),
         r"single logit z are np.stack\(\[0 \* z, z\]"),
        (lambda: combine_classification(np.zeros((2, 0, 3))),
         r"no dim of size 0 and at least 2 classes"),
        (lambda: combine_classification(P[0], from_logits=False),
         r"the probabilities have the shape \(2,\)"),
        (lambda: combine_classification(BAD),
         r"the logits hold NaN or infinite values, the first at "
         r"\[1, 1, 2\]. They come from member\(s\) 1, 3; leave these out."),
        (lambda: combine_classification(BAD[1]), r"first at \[1, 2\]\.$"),
        (lambda: combine_classification(np.stack([P, P + 1]), from_logits=False),
         r"member 1, example 0: the probabilities sum to 3 and the lowest is 1.5; they must be"),
        (lambda: nll(np.array([[1.5, -0.5], [0.5, 0.5]]), L), r"^example 0: .* lowest is -0.5"),
        (lambda: nll(P[None], L), r"have the shape \(1, 2, 2\); the shape must be "
         r"\(examples, classes\), with at least one example"),
        (lambda: brier(P, L[:1]), r"labels are int64 of shape \(1,\); they must be class indices"),
        (lambda: accuracy(P, P), r"the labels are float64 .* One-hot labels become that with"),
        (lambda: brier(P, np.array([0, 2])), r"labels\[1\] is 2, and the 2 classes are numbered 0 "
         r"to 1. Leave out examples without a label"),
        (lambda: fit_temperature(P, np.array([-1, 0])), r"labels\[0\] is -1"),
        (lambda: calibration(P, L, bins=0), r"bins=0: give a whole number of bins, at least 1"),
        (lambda: calibration(P, L, bins=2.0), r"bins=2.0: give"),
        (lambda: SAID.interval(1.0), r"level=1.0: the level of an interval must be above 0"),
        (lambda: SAID.quantile_interval(0), r"level=0: the level of an interval"),
        (lambda: SAID.coverage(np.zeros(3), 90), r"for 90 % write level=0.9"),
        (lambda: SAID.coverage(np.zeros((3, 1))), r"the targets have the shape \(3, 1\) and the "
         r"predictions \(3,\); give one target for each"),
        (lambda: SAID.coverage(np.full(3, np.nan)), r"the targets hold NaN"),
        (lambda: combine_regression(np.zeros(3)),
         r"the means have the shape \(3,\); .* give means\[None\]"),
        (lambda: combine_regression(BAD), r"the means hold NaN or infinite values"),
        (lambda: combine_regression(np.zeros((2, 3)), np.zeros(3)),
         r"the variances have the shape \(3,\) and "
         r"the means \(2, 3\); give a variance for each mean"),
        (lambda: combine_regression(np.zeros((1, 2)), np.array([[1.0, -2.0]])),
         r"variances must be at least "
         r"0; the lowest is -2, the first below 0 is at \[0, 1\]"),
        (lambda: draw_reliability({}, "a.png"), r"draw_reliability got nothing to draw; give at"),
        (lambda: draw_confidence({}, (0, 1, 0, 1), P, L, "a.png"), r"draw_confidence got nothing"),
        (lambda: draw_confidence({"a": P[0]}, (0, 1, 0, 1), P, L, "a.png"),
         r"the panel 'a' has the shape \(2,\); it must hold the probabilities of class 1 on"),
        (lambda: draw_confidence({"a": P}, (0, 1, 0, 1), P, L + 1, "a.png"), r"the labels the "
         r"shape \(2,\) and the values \[1, 2\]; the points must be \(N, 2\), the coordinates"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(call, match):
    with pytest.raises(BatchError, match=match):
        call()


# --- Pictures


def test_a_reliability_diagram_is_written(tmp_path):
    logits, labels = made()
    said = {
        f"{scale} times": calibration(combine_classification(scale * logits).probabilities, labels)
        for scale in range(1, 9)
    }
    figure = draw_reliability(said, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(PNG)
    above, below = figure.axes
    assert len(above.containers) == len(said)  # points with their intervals
    for bars, one in zip(below.containers, said.values(), strict=True):
        assert [bar.get_height() for bar in bars] == one.count.tolist()


def test_wilsons_intervals():
    """Against the table of R. G. Newcombe (Statistics in Medicine 1998), method 3."""
    accuracy, count = np.array([81 / 263, 15 / 148, 0 / 20, 1 / 29]), np.array([263, 148, 20, 29])
    below, above = _intervals(accuracy, count)
    np.testing.assert_allclose(accuracy - below, [0.2553, 0.0624, 0, 0.0061], atol=5e-5)
    np.testing.assert_allclose(accuracy + above, [0.3662, 0.1605, 0.1611, 0.1718], atol=5e-5)


def test_what_an_ensemble_does_not_know_is_drawn_beside():
    figure = draw_confidence({"mean": P}, (-1, 1, 0, 1), P, L, epistemic={"doubt": 0.1 * P})
    assert [axis.get_title() for axis in figure.axes] == ["mean", "doubt", "", ""]
    # What is below zero by rounding, or above ln 2, is drawn as if at the end.
    draw_confidence({"mean": P}, (-1, 1, 0, 1), P, L, epistemic={"doubt": 9 * P - 1})


@pytest.mark.parametrize("count", [1, 5])
def test_confidence_over_a_plane_is_written(count, tmp_path):
    x, y = np.meshgrid(np.linspace(-1, 1, 9), np.linspace(0, 1, 7))
    panels = {
        f"member {k}": softmax(np.stack([0 * x, k * x + y - 1], -1))[..., 1] for k in range(count)
    }
    draw_confidence(panels, (-1, 1, 0, 1), P, L, tmp_path / "plane.png")
    assert (tmp_path / "plane.png").read_bytes().startswith(PNG)
