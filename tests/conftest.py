"""Every test sees eight virtual CPU devices; warnings are errors (pyproject.toml)."""

import os
import shutil
import tempfile
from collections.abc import Iterator

# Most of a test is compiling: the last stage, machine code, is left without its optimizations. The
# compiled program is the same. Before JAX is imported, and inherited by processes of tests.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
import pytest
from hypothesis import settings

import plurax as px

px.virtual_devices(8)

# Many tests compile the same program: one cache for all workers of a session. The first process
# makes it, and the others inherit its name.
os.environ.setdefault("PLURAX_TEST_CACHE", tempfile.mkdtemp(prefix="plurax-tests-"))
jax.config.update("jax_compilation_cache_dir", os.environ["PLURAX_TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that made the cache removes it."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["PLURAX_TEST_CACHE"], ignore_errors=True)


settings.register_profile("plurax", deadline=None, print_blob=True)
settings.load_profile("plurax")


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
