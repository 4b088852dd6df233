"""What goes wrong for a user: seven kinds of error, one builder per message.

Every message says what is wrong, where, why, and what to write instead. The tests pin
their text. `assert` is for mistakes of our own.
"""

from plurax.errors.batches import *  # noqa: F403
from plurax.errors.checkpoints import *  # noqa: F403
from plurax.errors.experiments import *  # noqa: F403
from plurax.errors.kinds import *  # noqa: F403
from plurax.errors.members import *  # noqa: F403
from plurax.errors.plans import *  # noqa: F403
from plurax.errors.predictions import *  # noqa: F403
from plurax.errors.schedules import *  # noqa: F403
from plurax.errors.shardings import *  # noqa: F403
from plurax.errors.sweeps import *  # noqa: F403
from plurax.errors.tasks import *  # noqa: F403
