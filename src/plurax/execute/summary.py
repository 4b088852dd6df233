"""A program in a few words, without compiling anything."""

from collections.abc import Mapping
from typing import Any

import jax

from plurax.hlo.memory import memory
from plurax.notebook import html_table
from plurax.plan import Plan
from plurax.tree import human_bytes, parameter_count


def summary(program: Any, step: jax.stages.Compiled | None) -> dict[str, object]:
    """Return what a `Program` is, by name; of a compiled step also its memory."""
    shown: dict[str, object] = {"plan": program.plan, "batch_size": program.batch_size}
    if program.members is not None:
        shown["members"] = program.members.count
    shown["parameters"] = parameter_count(program.canonical_shapes.params)
    if step is not None:
        shown["peak_per_device"] = human_bytes(memory(step).peak)
    return shown


def in_a_line(shown: Mapping[str, object]) -> str:
    """Return a summary as the text of a program."""
    return f"Program({', '.join(f'{name}={value}' for name, value in shown.items())})"


def as_table(shown: Mapping[str, object]) -> str:
    """Return a summary as the HTML of a program."""
    return html_table("Program", ["", ""], shown.items())


def choice_text(plan: Plan) -> str:
    """Return a sentence that names the chosen `chunk` and `batch_dim`, and the method."""
    how = "from the shapes and the device (plurax.ensemble.tune measures instead)"
    return f"chunk={plan.chunk}, batch_dim={plan.batch_dim}: chosen {how}"
