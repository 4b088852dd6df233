"""What several messages say alike."""

import difflib
import re
from collections.abc import Sequence


def did_you_mean(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean ...?" with the known name that is most like the given one, or "".

    **Arguments:** `cutoff`, from 0 to 1, how alike they have to be (`difflib.get_close_matches`).

    >>> did_you_mean("dat", ["data", "tensor"])
    " Did you mean 'data'?"
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


WAYS = (
    (r"TracerArrayConversionError", "NumPy cannot compute with the arrays of a function that JAX "
     "traces: write jnp in place of np."),
    (r"TracerBoolConversionError", "Python's if cannot depend on the values of a batch: write "
     "jnp.where(condition, a, b)."),
    (r"ConcretizationTypeError|TracerIntegerConversionError", "A value of a batch is not known "
     "while JAX traces the function: leave out float(), int() and .item()."),
    (r"NonConcreteBooleanIndexError", "The number of rows may not depend on their values: give the "
     "others the weight 0 (Task(weight=...)), or write jnp.where(condition, a, b)."),
    (r"UnexpectedTracerError", "An array of one call was kept and used in another: return it from "
     "the function in place of storing it outside."),
    (r"[Nn]on-hashable static|unhashable type", "What jax.jit takes as static must be hashable: "
     "give a tuple in place of a list or an array."),
)  # fmt: skip
"""What the name and the text of an exception of JAX match, and what to write instead."""


def of_a_function(error: Exception, arguments: str, fields: Sequence[str]) -> str:
    """Return what to add to an exception that a function of the task raised.

    **Arguments:** `arguments`, what the function was called with; `fields`, of the batch.
    """
    said = f"{type(error).__name__}: {error}"
    ways = [way for pattern, way in WAYS if re.search(pattern, said)]
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and fields:
        ways += [
            f"The fields are {', '.join(map(repr, fields))}.{did_you_mean(error.args[0], fields)}"
        ]
    return "\n".join([*ways[:2], f"It was called with {arguments}."])
