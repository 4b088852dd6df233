"""Every message word for word: what the sources say is compared with what was written down.

After a change that is meant, write the texts anew and read what changed in the diff:

    python -m tests.unit.test_error_texts
"""

import functools
from pathlib import Path

import pytest
from tests.messages import all_messages

TEXTS = Path(__file__).with_name("error_texts.txt")


@functools.cache
def in_sources():
    """What each function says."""
    texts = {}
    for message in all_messages():
        texts.setdefault(message.where, []).append(str(message))
    return {where: "\n".join(said) for where, said in texts.items()}


@functools.cache
def written():
    """The file's entries, function: texts."""
    parts = TEXTS.read_text(encoding="utf-8").split("\n== ")[1:]
    return dict(part.rstrip("\n").split("\n", 1) for part in parts)


AGAIN = f"see the docstring of {Path(__file__).name}"


# The sources are read once, where a test runs, and not in every process that collects this file.
@pytest.mark.parametrize("where", sorted(written()))
def test_a_message_is_what_was_written(where):
    assert in_sources().get(where) == written()[where], AGAIN


def test_every_function_that_says_something_was_written():
    missing = in_sources().keys() - written().keys()
    assert not missing, f"{TEXTS.name} has no entry for them: {AGAIN}"


if __name__ == "__main__":
    TEXTS.write_text(
        "The messages of the library, by function; written by test_error_texts.py.\n"
        + "".join(f"\n== {where}\n{said}\n" for where, said in in_sources().items()),
        encoding="utf-8",
    )
