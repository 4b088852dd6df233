"""Write what an ensemble knows of what it knows, for the page of `plurax report`.

calibration.json
  predictions    by name: confidence, accuracy and count of each bin, error, scores
  uncertainty    by name: edges of bins; of total, aleatoric and epistemic the counts, the mean
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from plurax import errors
from plurax.disk import replace_file
from plurax.ensemble.uncertainty import Calibration, Classification, Regression

FILE = "calibration.json"
BINS = 24
"""Bins of a histogram of uncertainty."""


def save_calibration(
    directory: str | Path,
    calibrations: Mapping[str, Calibration],
    *,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    uncertainty: Mapping[str, Classification | Regression] | None = None,
) -> Path:
    """Write `calibration.json` into the folder of a run, where `plurax report` reads it.

    **Arguments:**

    - `directory`: the run's output directory.
    - `calibrations`: results of `plurax.ensemble.calibration` by their names in the page.
    - `scores`: further numbers of some of them, by these names: accuracy, log loss, ...
    - `uncertainty`: results of `combine_classification` or `combine_regression`, by name; the page
      shows how the total splits into aleatoric and epistemic.

    **Returns:** the path of the file. Raises `BatchError` where there is nothing to write.

    >>> import numpy as np, tempfile, plurax as px
    >>> said = px.ensemble.calibration(np.array([[0.8, 0.2]] * 4), np.array([0, 0, 0, 1]), bins=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_calibration(folder, {"ours": said}, scores={"ours": {"accuracy": 0.75}}).name
    'calibration.json'
    """
    if not calibrations and not uncertainty:
        raise errors.BatchError(
            "save_calibration got nothing to write. Give what predictions were compared with their "
            "labels, by name: save_calibration(path, {'ensemble': plurax.ensemble.calibration(p, "
            "y)})."
        )
    scores = scores or {}
    written = {
        "predictions": {
            name: {
                "confidence": _plain(result.confidence),
                "accuracy": _plain(result.accuracy),
                "count": np.asarray(result.count).tolist(),
                "error": result.error,
                "scores": {key: float(value) for key, value in scores.get(name, {}).items()},
            }
            for name, result in calibrations.items()
        },
        "uncertainty": {name: _histograms(result) for name, result in (uncertainty or {}).items()},
    }
    path = Path(directory) / FILE
    replace_file(path, json.dumps(written, indent=1).encode())
    return path


def _histograms(combined: Classification | Regression) -> dict[str, Any]:
    """Return how many examples have how much of each kind of uncertainty, in shared bins."""
    classes = isinstance(combined, Classification)
    total = combined.entropy if isinstance(combined, Classification) else combined.variance
    kinds = {"total": total, "aleatoric": combined.aleatoric, "epistemic": combined.epistemic}
    flat = {name: np.asarray(values, np.float64).ravel() for name, values in kinds.items()}
    most = max((float(values.max()) for values in flat.values() if values.size), default=0.0)
    edges = np.linspace(0.0, most or 1.0, BINS + 1)
    return {
        "unit": "nats" if classes else "variance",
        "edges": _plain(edges),
        **{
            name: {"count": np.histogram(values, edges)[0].tolist(), "mean": float(values.mean())}
            for name, values in flat.items()
            if values.size
        },
    }


def _plain(values: Float[np.ndarray, "N"]) -> list[float | None]:
    """Return numbers as JSON holds them: None for the NaN of an empty bin."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
