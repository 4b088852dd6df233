"""Every Python block of the README and the docs runs as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
WRITTEN = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = [page for page in WRITTEN if "```python" in page.read_text(encoding="utf-8")]
START = "import plurax as px\npx.virtual_devices(8)\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_page_runs(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    code = "\n".join(
        "\n".join(line.removeprefix(indent) for line in block.splitlines())
        for indent, block in blocks
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", START + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_pages_have_each_heading_once():
    """A page that was pasted into itself has all of them twice."""
    for page in WRITTEN:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        headings = re.findall(r"^#+ .*", text, flags=re.MULTILINE)
        assert sorted(headings) == sorted(set(headings)), page


def test_the_doctests_run():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--doctest-modules", "src"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
