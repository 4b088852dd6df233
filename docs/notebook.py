"""Write the tutorial as a notebook: `python docs/notebook.py` makes it of tutorial.md."""

import json
import re
from pathlib import Path

PAGE = Path(__file__).with_name("tutorial.md")
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)


def notebook(page: str) -> str:
    """Return a page as the JSON of a notebook; what blocks print is left to the kernel."""
    cells, at = [], 0
    for block in CODE.finditer(page):
        cells += [("markdown", page[at : block.start()]), ("code", block[1])]
        at = block.end()
    cells.append(("markdown", page[at:]))
    made = [
        {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.strip().splitlines(keepends=True),
            **({"execution_count": None, "outputs": []} if kind == "code" else {}),
        }
        for number, (kind, text) in enumerate(cells)
        if text.strip()
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text("utf-8")), "utf-8")
