"""Every test sees eight virtual CPU devices; warnings are errors (pyproject.toml)."""

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Most of a test is compiling: the last stage, machine code, is left without its optimizations. The
# compiled program is the same. Before JAX is imported, and inherited by processes of tests.
# Virtual devices wait for each other: on a busy machine longer than XLA's forty seconds.
FLAGS = {
    "--xla_backend_optimization_level": "0",
    # A program's machine code in one piece, without what LLVM takes long for: 0.72 of the
    # processor's time. By default it is in 32 pieces, for idle cores, of which there are none here.
    "--xla_cpu_parallel_codegen_split_count": (
        "32" if os.environ.get("PLURAX_TEST_UNCACHED") else "1"
    ),
    "--xla_llvm_disable_expensive_passes": (
        "false" if os.environ.get("PLURAX_TEST_UNCACHED") else "true"
    ),
    # Several devices' programs come from the cache right only so (distributed.compilation_cache).
    "--xla_cpu_enable_concurrency_optimized_scheduler": (
        "true" if os.environ.get("PLURAX_TEST_UNCACHED") else "false"
    ),
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "600",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "1200",
    "--xla_cpu_collective_timeout_seconds": "1200",
}
if version("jaxlib").startswith("0.10."):
    # XLA's newer code for fusions takes longer to compile; newer versions have no other.
    FLAGS["--xla_cpu_use_fusion_emitters"] = (
        "true" if os.environ.get("PLURAX_TEST_UNCACHED") else "false"
    )
# The flags are a part of the cache's keys. A process of a test inherits them and sets them again:
# they must stay the same text, or every process would compile anew.
os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] not in FLAGS]
    + [f"{name}={value}" for name, value in FLAGS.items()]
)

# Most of the rest is compiling, too: what was compiled once is kept between runs, outside the
# checkout, and found by every process of a test through JAX's own variables.
os.environ.setdefault(
    "PLURAX_TEST_CACHE",
    str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "plurax-tests")),
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["PLURAX_TEST_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Under PLURAX_TEST_UNCACHED a program is what a user's is: scheduled as XLA does by default, which
# changes what it holds at a time, and so never taken from a cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = (
    "false" if os.environ.get("PLURAX_TEST_UNCACHED") else "true"
)

import jax
import pytest
from hypothesis import settings
from matplotlib.figure import Figure

import plurax as px
from tests.promotion import forbid_promotion, promotion
from tests.tiers import mark, takes_turn, unmatched
from tests.typecheck import check_public_names

px.virtual_devices(8)
jax.devices()  # else a test that begins with a command gets as many as that command needs
check_public_names()
forbid_promotion()

# JAX's traces allocate millions of objects, and most live on: looking for garbage among them, each
# 700 objects as Python does, took 12 % of the suite. What is imported is never garbage.
gc.freeze()
gc.set_threshold(100_000, 50, 100)

CACHE = Path(os.environ["PLURAX_TEST_CACHE"])
MAX_BYTES = 2_000_000_000


def pytest_sessionstart(session: pytest.Session) -> None:
    """The oldest programs make room; by the first process, before there are others."""
    if hasattr(session.config, "workerinput"):
        return
    entries = [(path.stat(), path) for path in CACHE.glob("*") if path.is_file()]
    held = sum(stat.st_size for stat, _ in entries)
    for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
        if held <= MAX_BYTES:
            break
        path.unlink(missing_ok=True)
        held -= stat.st_size


# The default draws the same few cases every time; `make test-all` draws many new ones.
settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("all", deadline=None, print_blob=True, max_examples=500)
settings.load_profile(os.environ.get("PLURAX_TEST_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves to `.ci/run`, and to `make test-all`.

    A line of `tests/tiers.toml` that says nothing about the files that were collected is an error.
    """
    for item in items:
        if name := mark(item.nodeid):
            item.add_marker(name)
    if not any("::" in argument for argument in config.args):
        shown = {
            item.nodeid
            for item in items
            if not any(item.get_closest_marker(name) for name in ("slow", "gangs", "ci"))
        }
        if lines := unmatched({item.nodeid for item in items}, shown):
            raise pytest.UsageError(
                "tests/tiers.toml: no such test of `make test`: " + "; ".join(lines[:9])
            )
    if turn := os.environ.get("PLURAX_TEST_TURN"):
        waiting = {
            item for item in items
            if item.get_closest_marker("ci") and not item.get_closest_marker("gangs")
            and not takes_turn(item.nodeid, turn)
        }  # fmt: skip
        config.hook.pytest_deselected(items=[item for item in items if item in waiting])
        items[:] = [item for item in items if item not in waiting]


@pytest.fixture(scope="module")
def uncached(request: pytest.FixtureRequest) -> bool:
    """Whether this process compiles as a user's does.

    Else the module's tests that ask for it have run in one that does, all in the same.
    """
    if os.environ.get("PLURAX_TEST_UNCACHED"):
        return True
    tests = [
        item.nodeid
        for item in request.session.items
        if item.path == request.path and "uncached" in getattr(item, "fixturenames", ())
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", "", *tests],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        env={**os.environ, "PLURAX_TEST_UNCACHED": "1"},
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return False


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """What a file has traced and compiled is dropped after it: files share next to nothing of it,
    and a process that holds everything takes longer for all that follows. What is left then lives
    as long as the process, such as modules: to look through it after every file took 3 % of it."""
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def commands_return() -> Iterator[None]:
    """A command that fails raises `SystemExit` in tests.

    As a process of its own it ends at once where another thread lives, such as those of a pool that
    an earlier test has started.
    """
    with pytest.MonkeyPatch.context() as patch:
        if commands := sys.modules.get("plurax.cli.dispatch"):
            patch.setattr(commands, "leave", sys.exit)
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


# Pages, examples and what is written by hand in plain JAX do as a user does.
PROMOTE = ("tests/test_documents.py", "tests/test_examples.py", "tests/absent/test_by_hand.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Under JAX's own rules of promotion where a file is listed, its fixtures included."""
    listed = item.nodeid.startswith(PROMOTE)
    with promotion() if listed else contextlib.nullcontext():
        return (yield)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Every figure that was saved, by the name of its file; `tests.pictures` reads them."""
    figures: dict[str, Figure] = {}
    save = Figure.savefig

    def saved(figure: Figure, path: str | Path, **options: Any) -> None:
        # A picture is written beside its place, `.a.png.new`, and renamed.
        figures[Path(path).name.removeprefix(".").removesuffix(".new")] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures
