"""Options of XLA's compiler that help a kind of device: what `advised_options.toml` says."""

import importlib.resources
from typing import Any

from plurax.reading import parse_toml


def advised_options() -> dict[str, dict[str, dict[str, Any]]]:
    """Return for each kind of device its options by name: the `value`, and `why`."""
    folder = importlib.resources.files("plurax.trace")
    return parse_toml(folder.joinpath("advised_options.toml").read_text("utf-8"))
