"""Messages about the processes of a gang."""

from plurax.errors.kinds import PeerError


def process_ended(who: str) -> PeerError:
    return PeerError(
        f"{who} has ended, so this one cannot go on. Its own output says why; the newest "
        "checkpoint is kept, and `plurax launch` restarts all of them from it."
    )
