"""Damage: what is proven to be other than it was saved."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged: it was set aside or passed over, and an older one is taken."""


class Damage(Exception):  # noqa: N818  a finding
    """Bytes of a checkpoint are missing, unreadable or not those that were saved.

    Raised only where this is proven by a checksum. Anything else that goes wrong while restoring
    (memory, permissions, a device) says nothing about the checkpoint, and is passed on as it is.
    """
