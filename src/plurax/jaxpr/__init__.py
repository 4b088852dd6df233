"""What depends on JAX's jaxprs: names, the interpreter, remat, barriers, batch-minor, attention."""
