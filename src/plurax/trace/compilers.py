"""The rules of each platform's compiler."""

from plurax.trace import xla_cpu, xla_gpu, xla_tpu
from plurax.trace.compiler_rules import CompilerRules

# To add a platform: its rules in a file beside these, a row here, and its name in `_platform` of
# `machine.py`.
COMPILERS = {"cpu": xla_cpu.RULES, "gpu": xla_gpu.RULES, "tpu": xla_tpu.RULES}


def rules_of(platform: str) -> CompilerRules:
    """Return the rules of the compiler for a platform, named as JAX names it."""
    return COMPILERS.get(platform, xla_cpu.RULES)
