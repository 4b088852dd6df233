"""How the leaves of a training state are sharded, padded and put on stages."""
