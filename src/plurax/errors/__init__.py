"""What goes wrong for a user: kinds of error and of warning, and builders of messages.

The kinds are public, `plurax.errors.PlanError`; the builders, one for each message that is used
several times, are the library's own.

A message that is used once stands where it is raised. Every message says what is wrong, where,
why, and what to write instead; tests pin its text. `assert` is for mistakes of our own.
"""

from plurax.errors import kinds
from plurax.errors.argument_errors import *  # noqa: F403
from plurax.errors.batch_errors import *  # noqa: F403
from plurax.errors.checkpoint_errors import *  # noqa: F403
from plurax.errors.experiment_errors import *  # noqa: F403
from plurax.errors.hints import *  # noqa: F403
from plurax.errors.kinds import *  # noqa: F403
from plurax.errors.machine_errors import *  # noqa: F403
from plurax.errors.member_errors import *  # noqa: F403
from plurax.errors.plan_errors import *  # noqa: F403
from plurax.errors.process_errors import *  # noqa: F403
from plurax.errors.source_errors import *  # noqa: F403
from plurax.errors.task_errors import *  # noqa: F403

__all__ = sorted(name for name, value in vars(kinds).items() if isinstance(value, type))


def __dir__() -> list[str]:
    return __all__
