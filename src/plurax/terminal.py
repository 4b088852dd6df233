"""What reaches a terminal: text, and no commands to it.

Names of metrics, events and files may come from others. An escape sequence in one could set the
window's title, hide lines, or type on some terminals. So what is shown goes through `printable`:
`plurax.console` does so for Rich.
"""

import re

COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tabs and ends of lines, and those that turn the direction of writing."""


def printable(text: str) -> str:
    r"""Return the text with its control characters written out.

    >>> print(printable("loss\x1b[2J"))
    loss\x1b[2J
    """
    return COMMANDS.sub(lambda found: repr(found[0])[1:-1], text)
