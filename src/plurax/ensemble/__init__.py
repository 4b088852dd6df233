"""Select and join members, and combine their predictions."""
