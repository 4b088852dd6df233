"""The rules of each platform's compiler."""

from plurax import errors
from plurax.trace import xla_cpu, xla_gpu, xla_tpu
from plurax.trace.compiler_rules import CompilerRules

# To add a platform: its rules in a file beside these, a row here, and its name in `_platform` of
# `machine.py`.
COMPILERS = {"cpu": xla_cpu.RULES, "gpu": xla_gpu.RULES, "tpu": xla_tpu.RULES}


def rules_of(platform: str) -> CompilerRules:
    """Return the rules of the compiler for a platform, named as JAX names it.

    Raises `MachineError` for a platform of which none are known.
    """
    if platform not in COMPILERS:
        raise errors.MachineError(
            f"nothing is known of the memory that XLA's compiler for {platform!r} takes; plurax "
            f"plans it for {', '.join(map(repr, COMPILERS))}. Estimate for a machine of one of "
            "these: machine=..., or --machine on the command line."
        )
    return COMPILERS[platform]
