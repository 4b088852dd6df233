"""The data of the populations of small networks, and the arithmetic of training one of them.

NumPy only, but for scikit-learn's digits: the peers read what is made here from a file.
"""

import itertools

import numpy as np

from benchmarks.sizes import Mlp

TRAINING_ROWS = 1437
"""Of the 1,797 digits."""
ADAM_OPERATIONS = 14
"""For each parameter and step: two moving averages, their corrections, root, quotient, step."""


def spirals() -> dict[str, np.ndarray]:
    """100 points of two noisy spirals, and on which of the two they lie."""
    rng = np.random.default_rng(0)
    radius = np.sqrt(np.linspace(0, 1, 100))
    angle = 2 * np.pi * radius
    side = rng.choice([-1, 1], 100)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) * (radius * side)[:, None]
    noisy = points + 0.05 * rng.standard_normal(points.shape)
    return {"x": noisy.astype(np.float32), "y": (side > 0).astype(np.int32)}


def digits() -> dict[str, np.ndarray]:
    """Scanned digits, 64 grey values from 0 to 1, in random order. Raises `ImportError`."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    rows = np.random.default_rng(0).permutation(len(found.target))[:TRAINING_ROWS]
    return {
        "x": (found.data[rows] / 16).astype(np.float32),
        "y": found.target[rows].astype(np.int32),
    }


DATA = {"spirals": spirals, "digits": digits}


def bootstrap(rows: int, members: int, epochs: int, steps: int, batch: int) -> np.ndarray:
    """The rows of each step `(members, epochs × steps, batch)`.

    Each member has a bootstrap sample of its own, shuffled anew in each epoch; what is left of an
    epoch after `steps` batches is not read.
    """
    rng = np.random.default_rng(0)
    sample = rng.integers(0, rows, (members, rows), np.int32)
    orders = [rng.permuted(sample, axis=1)[:, : steps * batch] for _ in range(epochs)]
    return np.stack(orders, axis=1).reshape(members, epochs * steps, batch)


def arithmetic(network: Mlp, batch: int) -> dict[str, int]:
    """What one step of one network needs: operations, and bytes that move.

    - `products`: floating-point operations of the matrix products. Each weight matrix takes part in
      the forward product, in its own gradient, and, but for the first, in that of its inputs.
    - `elementwise`: those of biases, ReLU, cross entropy, their gradients, and Adam; a root, a
      logarithm and an exponential count as one.
    - `bytes`: where every array between matrix products goes through memory: float32 inputs read,
      activations and their gradients written and read once, parameters and both moments read and
      written.
    """
    layers = list(itertools.pairwise(network.widths))
    parameters = sum(a * b + b for a, b in layers)
    hidden, classes = sum(network.widths[1:-1]), network.widths[-1]
    products = sum(2 * batch * a * b * (3 if i else 2) for i, (a, b) in enumerate(layers))
    biases = 2 * batch * (hidden + classes)
    relu = 2 * batch * hidden
    entropy = batch * (7 * classes + 3)
    between = 2 * 2 * 4 * batch * (hidden + classes)
    return {
        "products": products,
        "elementwise": biases + relu + entropy + ADAM_OPERATIONS * parameters,
        "bytes": 4 * batch * (network.widths[0] + 1) + between + 3 * 2 * 4 * parameters,
    }
