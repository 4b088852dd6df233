"""The rules of each platform's compiler."""

from plurax.trace import xla_cpu, xla_gpu, xla_tpu
from plurax.trace.compiler_rules import CompilerRules


def rules_of(platform: str) -> CompilerRules:
    """Return the rules of the compiler for a platform, named as JAX names it."""
    return {"gpu": xla_gpu.RULES, "tpu": xla_tpu.RULES}.get(platform, xla_cpu.RULES)
