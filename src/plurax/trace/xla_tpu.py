"""What XLA's TPU compiler keeps in memory: rules as data, beside those of CPUs (`xla_cpu`)."""

from plurax.trace import xla_cpu

RULES = xla_cpu.RULES
"""Memory on TPUs, too much rather than too little: XLA fuses more there."""
