"""The exception for checkpoints whose bytes are proven to have changed."""


class Damage(Exception):  # noqa: N818  a finding
    """Bytes of a checkpoint are missing, unreadable or different from those that were saved.

    Raised only where a checksum proves it. Any other error while restoring (memory, permissions, a
    device) says nothing about the checkpoint, and propagates unchanged.
    """
