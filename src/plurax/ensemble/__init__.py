"""Many networks: keeping them, sweeping, halving, and predicting together."""
