"""A worker's end of the pipe: build the sides, then run them on request and report seconds.

Standard library only: the peers' Python runs it too. Requests and answers are lines of JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]
Side = Callable[[int], object]
"""Does this many units of work (steps, epochs, passes) and returns when they are finished.

A dict that it returns goes into the answer; its `seconds`, if any, replace those measured around
it.
"""


class SkippedError(Exception):
    """This machine cannot measure this; the message says why."""


def serve(build: Callable[[Settings], tuple[dict[str, Side], dict[str, Any]]]) -> None:
    """Answer requests on standard input until it closes.

    **Arguments:**

    - `build(settings) -> (sides, facts)`: `settings` come from the command line as JSON; `facts`
      go to the results as they are.
    """
    # Frameworks print; only answers may stand on the pipe.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        sides, facts = build(json.loads(sys.argv[1]))
    except SkippedError as reason:
        answer({"skipped": str(reason)})
        return
    answer({"facts": facts})
    for line in sys.stdin:
        request = json.loads(line)
        start, used = time.perf_counter(), time.process_time()
        found = sides[request["side"]](request["units"])
        seconds, processor = time.perf_counter() - start, time.process_time() - used
        told = found if isinstance(found, dict) else {}
        answer({"seconds": seconds, "processor_seconds": processor} | told)
