"""The benchmark harness works: one measurement in a tiny size, from the command to the file."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_a_quick_measurement_writes_both_sides(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "accumulation", "--quick", "--output", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("quick-*.json")
    rows = json.loads(written.read_text())["rows"]
    assert rows
    for row in rows:
        assert row["plurax"]["median"] > 0
        assert row["other"]["median"] > 0
        assert row["against"] == "optax.MultiSteps"
