"""The training loop and its events: calls, batches read ahead, metrics, rows, hooks."""
