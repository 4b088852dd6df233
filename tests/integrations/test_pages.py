"""The guide on data runs whole: its blocks with a title need large libraries."""

import os
import re
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

from tests import test_documents

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"


def test_the_guide_on_data_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = test_documents.BLOCKS.pattern.replace(
        "```python\\n", '```python(?: title="[^"]*")?\\n'
    )
    monkeypatch.setattr(test_documents, "BLOCKS", re.compile(blocks, test_documents.BLOCKS.flags))
    found = test_documents.BLOCKS.findall(PAGE.read_text(encoding="utf-8"))
    assert sum("import torch" in str(block) for block in found) == 1
    with pytest.MonkeyPatch.context():
        test_documents.run(PAGE)
