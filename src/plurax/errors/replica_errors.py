"""Messages about devices that hold other bits than they should."""

from collections.abc import Sequence

from plurax.errors.kinds import ReplicaError


def replicas_differ(
    step: int, devices: Sequence[str], leaves: Sequence[str], certain: bool
) -> ReplicaError:
    who = " and ".join(devices)
    if certain:
        verb = "holds" if len(devices) == 1 else "hold"
        what = f"{who} {verb} other bits than most copies of {_some(leaves)}"
    else:
        what = f"{who} hold different bits in {_some(leaves)}, and no majority says which are right"
    return ReplicaError(
        f"after step {step} {what}. They are computed from the same sums and must be equal, so a "
        "device's memory or arithmetic is at fault. Each checkpoint was compared before it was "
        "saved: resume from the newest, and leave that device out if it happens again."
    )


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
