"""The yardstick of the parity tests can fail."""

import numpy as np
import pytest
from tests import models

ONES = {"w": np.ones(3, np.float32), "n": np.int32(2)}


def test_the_largest_difference_of_each_leaf_relative_to_its_largest_element():
    other = {"w": np.array([1, 1, 4], np.float32), "n": np.int32(2)}
    assert models.max_rel_error(ONES, ONES) == 0
    assert models.max_rel_error(ONES, other) == 0.75
    assert models.max_rel_error(
        {"w": 2j * np.ones(2)}, {"w": 2 * np.ones(2) + 0j}
    ) == pytest.approx(2**0.5)
    assert models.max_rel_error({}, {}) == 0
    assert models.max_rel_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("side", [0, 1, 2])
def test_nan_is_never_near(place, side):
    bad = np.ones(3, np.float32)
    bad[place] = np.nan
    trees = [{"a": np.ones(2), "w": bad if side in (of, 2) else np.ones(3, np.float32),
              "z": np.ones(2)} for of in (0, 1)]  # fmt: skip
    assert not models.max_rel_error(*trees) < 1e30


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({**ONES, "w": np.ones((3, 1), np.float32)}, r"\['w'\]: shape \(3, 1\) is not \(3,\)"),
        ({**ONES, "w": np.ones(1, np.float32)}, r"\['w'\]: shape \(1,\) is not \(3,\)"),
        ({**ONES, "w": np.ones(3)}, r"\['w'\]: dtype float64 is not float32"),
        ({**ONES, "n": np.int64(2)}, r"\['n'\]: dtype int64 is not int32"),
        ({"w": ONES["w"]}, "is not PyTreeDef"),
        ({**ONES, "n": None}, "is not PyTreeDef"),
        ([ONES["n"], ONES["w"]], "is not PyTreeDef"),
    ],
)
def test_shapes_dtypes_and_structure_are_compared(other, said):
    with pytest.raises(AssertionError, match=said):
        models.max_rel_error(other, ONES)
