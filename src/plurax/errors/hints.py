"""What several messages say alike."""

import difflib
from collections.abc import Sequence


def did_you_mean(given: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean ...?" with the known name that is most like the given one, or "".

    **Arguments:** `cutoff`, from 0 to 1, how alike they have to be (`difflib.get_close_matches`).

    >>> did_you_mean("dat", ["data", "tensor"])
    " Did you mean 'data'?"
    """
    close = difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""
