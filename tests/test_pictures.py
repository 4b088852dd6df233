"""Every picture that a user can draw has a section of the guide, with a picture and a block."""

import importlib
import re
from pathlib import Path

import pytest

from tests.test_architecture import PUBLIC

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "pictures.md"
DRAWN = [
    (module, name)
    for module, names in PUBLIC.items()
    for name in names.split()
    if name.startswith("draw_")
]


def sections():
    _, *parts = re.split(r"^### `(.*?)`\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("module", "name"), DRAWN)
def test_a_picture_is_shown_in_the_guide(module, name):
    section = sections()[name]
    call = module.replace("plurax", "px") + f".{name}"
    assert f"`{call}`" in section
    assert any(f"{call}(" in block for block in re.findall(r"```python\n.*?```", section, re.S))
    shown = re.findall(r"!\[.+?\]\((.+?)\)", section)
    assert shown
    assert all((PAGE.parent / one).is_file() for one in shown)
    described = getattr(importlib.import_module(module), name).__doc__
    assert f"guides/pictures.md#{name})" in described


def test_the_guide_shows_nothing_that_is_not_public():
    assert set(sections()) == {name for _, name in DRAWN}


def test_pictures_of_the_documentation_are_small():
    """`docs/pictures.py` and `benchmarks.report` write them with few colours."""
    large = {
        path.name: path.stat().st_size
        for path in (PAGE.parents[1] / "assets").glob("*.png")
        if path.stat().st_size > 120_000
    }
    assert not large
