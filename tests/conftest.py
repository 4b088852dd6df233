"""Every test sees eight virtual CPU devices; warnings are errors (pyproject.toml)."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Most of a test is compiling: the last stage, machine code, is left without its optimizations. The
# compiled program is the same. Before JAX is imported, and inherited by processes of tests.
# Virtual devices wait for each other: on a busy machine longer than XLA's forty seconds.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
        "--xla_cpu_collective_timeout_seconds=1200",
    ]
)

import jax
import pytest
from hypothesis import settings
from matplotlib.figure import Figure

import plurax as px

px.virtual_devices(8)

# Many tests compile the same program: one cache for all workers of a session. The first process
# creates it, and the others inherit its name. A folder named from outside is kept between sessions.
KEPT = "PLURAX_TEST_CACHE" in os.environ
os.environ.setdefault("PLURAX_TEST_CACHE", tempfile.mkdtemp(prefix="plurax-tests-"))
jax.config.update("jax_compilation_cache_dir", os.environ["PLURAX_TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that created the cache removes it."""
    if not KEPT and not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["PLURAX_TEST_CACHE"], ignore_errors=True)


# The default draws the same few cases every time; `make test-all` draws many new ones.
settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("all", deadline=None, print_blob=True, max_examples=500)
settings.load_profile(os.environ.get("PLURAX_TEST_PROFILE", "default"))


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Every figure that was saved, by the name of its file; `tests.pictures` reads them."""
    figures: dict[str, Figure] = {}
    save = Figure.savefig

    def saved(figure: Figure, path: str | Path, **options: Any) -> None:
        figures[Path(path).name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures
