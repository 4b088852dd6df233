"""Many populations: sweeps over shapes, and successive halving."""
