"""What goes wrong for a user: kinds of error, and a builder of each message used several times.

A message that is used once stands where it is raised. Every message says what is wrong, where,
why, and what to write instead; tests pin its text. `assert` is for mistakes of our own.
"""

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
