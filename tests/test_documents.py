"""Every Python block of the README and the docs runs as written, and prints what the page says.

A `text` block right after one is what it prints. In a `console` block each line that begins with
`$ plurax` is a command, and the lines after it are what it prints.
"""

import ast
import contextlib
import dataclasses
import doctest
import importlib
import io
import pkgutil
import re
import shlex
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import plurax as px
from plurax.cli import dispatch as cli

REPOSITORY = Path(__file__).parents[1]
WRITTEN = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
ELSEWHERE = {REPOSITORY / "docs" / folder / "keras.md" for folder in ("guides", "coming-from")}
"""Pages that need a large library: tests/integrations runs them."""
PAGES = [
    page
    for page in WRITTEN
    if "```python" in page.read_text(encoding="utf-8") and page not in ELSEWHERE
]
BLOCKS = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^ *```\n(\s*^ *```text\n(?P<text>.*?)^ *```)?"
    r"|^```console\n(?P<console>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\d])")
TIME = re.compile(r"\s*(µs|ms|s|seconds|examples/s)\b")


# Pages that show what a program holds, or in which order it communicates.
COMPILED = {
    "long-context.md", "members.md", "pipelines.md", "remat.md", "theory.md", "tutorial.md",
    "worked-cases.md",
}  # fmt: skip
HELD = re.compile(r"\b(bytes|MiB|arrays|need)\b")
"""Lines with numbers that are another compiler's where programs come from the cache."""


def each(pages):
    return pytest.mark.parametrize(
        "page", pages, ids=lambda page: str(page.relative_to(REPOSITORY))
    )


class Wandb:
    """The client of Weights & Biases, as far as pages need it; tests/integrations has the real."""

    def init(self, **options):
        return SimpleNamespace(id="a-run", log=self.log, finish=self.finish)

    def log(self, row, step):
        assert row
        assert step > 0

    def finish(self, exit_code):
        assert exit_code == 0


@each(PAGES)
def test_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    if "virtual_devices(" not in page.read_text(encoding="utf-8"):
        first = jax.devices()[:1]  # a reader may have no more
        monkeypatch.setattr(jax, "devices", lambda *_, **__: first)
        monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    run(page, HELD if page.name in COMPILED else None)


@pytest.mark.slow
@each([page for page in PAGES if page.name in COMPILED])
def test_what_a_users_programs_hold_is_what_the_page_says(page, tmp_path, monkeypatch, uncached):
    if uncached:
        monkeypatch.chdir(tmp_path)
        run(page)


def run(page, words_only=None):
    """Run a page's blocks and compare what they print; of some lines the words, not the numbers."""
    text = page.read_text(encoding="utf-8")
    names = {"__name__": "__main__"}
    for block in BLOCKS.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        if block["console"] is not None:
            run_commands(f"{page.name}:{line}", block["console"], words_only)
            continue
        code = "\n" * line + _undented(block["code"], block["indent"])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
            exec(compile(code, str(page), "exec"), names)
        if block["text"] is not None:
            said = _undented(block["text"], block["indent"])
            differ = different(said, printed.getvalue(), words_only)
            assert not differ, f"{page.name}:{line} prints something else:\n{differ}"


def run_commands(where, block, words_only=None):
    """Run the commands of a `console` block in this process, and compare what they print."""
    first, *parts = re.split(r"^\$ plurax ", block, flags=re.MULTILINE)
    assert not first, f"{where}: a console block begins with `$ plurax`"
    for part in parts:
        command, _, said = part.partition("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as stopped:
            cli.main(shlex.split(command, comments=True))
        assert stopped.value.code == 0, f"{where}: plurax {command} exits with {stopped.value.code}"
        differ = different(said, printed.getvalue(), words_only)
        assert not differ, f"{where}: plurax {command} prints something else:\n{differ}"


def _undented(block, indent):
    return "\n".join(line.removeprefix(indent) for line in block.splitlines())


def different(said, printed, words_only=None):
    """The lines in which a page and what was printed differ; empty where they do not.

    Words and whole numbers must be the same, `...` stands for anything, times are not compared, and
    other numbers may differ by a hundredth, or by one in their last digit: other processors add up
    in another order. Of lines that match `words_only` no numbers are compared.
    """
    a = [line.rstrip() for line in said.splitlines() if line.strip()]
    b = [line.rstrip() for line in printed.splitlines() if line.strip()]
    if len(a) != len(b) and "..." not in a:
        return f"{len(a)} lines, and {len(b)} were printed:\n{printed}"

    def alike(one, other):
        return _alike(one, other, words_only is not None and words_only.search(one))

    return "\n".join(
        f"- {one}\n+ {other}" for one, other in _pairs(a, b, alike) if not alike(one, other)
    )


def _pairs(said, printed, alike):
    """Pair lines of a page with those printed; a line `...` stands for any number of lines."""
    parts = [[]]
    for line in said:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    start = 0
    for index, part in enumerate(parts):
        if part and index == len(parts) - 1 > 0:
            start = max(start, len(printed) - len(part))
        elif part and index:
            places = range(start, len(printed))
            start = next((at for at in places if alike(part[0], printed[at])), start)
        found = printed[start : start + len(part)]
        yield from zip(part, found + [""] * (len(part) - len(found)), strict=True)
        start += len(part)


def _alike(said, printed, words_only):
    pattern = ".*?".join(_pattern(part) for part in said.split("..."))
    found = re.fullmatch(pattern, printed)
    if found is None or words_only:
        return found is not None
    return all(
        _close(number[0], other) or TIME.match(said, number.end())
        for number, other in zip(NUMBER.finditer(said), found.groups(), strict=True)
    )


def _pattern(text):
    """The words of a text, runs of blanks as one, and a group for each number."""
    parts, last = [], 0
    for number in NUMBER.finditer(text):
        parts += [_words(text[last : number.start()]), r"([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)"]
        last = number.end()
    return "".join([*parts, _words(text[last:])])


def _words(text):
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


def _close(said, printed):
    a, b = float(said.replace(",", "")), float(printed.replace(",", ""))
    decimals = len(said.partition("e")[0].partition(".")[2])
    if "." not in said and "e" not in said:
        return a == b  # counts are exact
    return abs(a - b) <= max(0.01 * abs(a), 1.01 * 10.0**-decimals)


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("a 1\nb", "a 1\nb", True),
        ("a 1\nb", "a 2\nb", False),
        ("a 1\nb", "a 1", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("a\n...\nc 3\n...", "a\nb\nc 3\nd", True),
        ("a\n...\nc 3\n...", "a\nb\nc 4\nd", False),
        ("...\na\n...\nb\n...", "b\na\nc", False),
        ("...\na", "", False),
    ],
)
def test_lines_may_be_left_out(said, printed, same):
    assert (not different(said, printed)) == same


def test_commands_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_commands("here", "$ plurax new a.py\nwrote a.py\n...\n$ plurax examples\n...\n")
    with pytest.raises(AssertionError, match="plurax examples prints something else"):
        run_commands("here", "$ plurax examples\nnone\n...\n")


def test_pages_have_each_heading_once():
    """A page that was pasted into itself has all of them twice."""
    for page in WRITTEN:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        headings = re.findall(r"^#+ .*", text, flags=re.MULTILINE)
        assert sorted(headings) == sorted(set(headings)), page


def test_plans_in_sentences_are_plans():
    """A `Plan(...)` in a sentence or a table has fields and values that plans have."""
    fields = {field.name for field in dataclasses.fields(px.Plan)}
    found = 0
    for page in WRITTEN:
        if page.name == "mistakes.md":  # it shows plans that are refused
            continue
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for plan in re.findall(r"`(?:px\.)?(Plan\([^`]*\))`", text):
            call = ast.parse(plan, mode="eval").body
            assert {keyword.arg for keyword in call.keywords} <= fields, (page, plan)
            given = [k for k in call.keywords if isinstance(k.value, ast.Constant)]
            px.Plan(**{k.arg: k.value.value for k in given if k.value.value is not ...})
            found += 1
    assert found > 10


@pytest.mark.ci
def test_the_doctests_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attempted = 0
    for module in pkgutil.walk_packages(px.__path__, "plurax."):
        # The command line would start; Keras is tested by tests/integrations.
        if module.name.endswith(("__main__", "adapters.keras")):
            continue
        done = doctest.testmod(importlib.import_module(module.name))
        assert done.failed == 0, module.name  # what differs is printed
        attempted += done.attempted
    assert attempted > 200
