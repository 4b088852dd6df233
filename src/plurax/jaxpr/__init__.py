"""What depends on JAX's jaxprs: groups of primitives, remat, barriers, batch-minor."""
