"""All that knows JAX's equations: primitives, remat, barriers, batch-minor."""
