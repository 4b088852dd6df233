"""The step that is recorded sends what the compiled one does.

By kind and mesh axes, to the byte. The recorded step has the collectives in the program that is
given to the compiler, so what differs is what the compiler did with them.
"""

from collections import Counter

from plurax.execute.recorder import record_step
from plurax.trace.collectives import every_collective
from tests.zoo import by_hand

# Loops of unknown length: the recorded step counts what is in them once, the compiled one as often
# as the compiler finds that they run. The collectives are of the same kinds, over the same axes.
UNKNOWN = {"equilibrium", "implicit", "neural ode"}

# The compiler computes some equal operations once: in derivatives of derivatives, in a scan that is
# written out, in two branches.
MERGED = {"branch", "pinn", "state space"}


def bytes_by_kind(collectives):
    sizes = Counter()
    for one in collectives:
        sizes[one.equivalent_kind or one.kind, one.axes] += one.bytes * (one.trips or 1)
    return sizes


def assert_recorded_is_compiled(name, program, task, batch):
    """Of a network of the zoo; its program was compiled for a batch like this one."""
    compiled, recorded = program.collectives(), program.planned_collectives()
    if not recorded:  # the batch alone is split, which is not planned
        recorded = every_collective(record_step(task, by_hand.optimizer(), program.plan, batch))
        assert {one.axes for one in recorded} <= {("data",)}
    found, wanted = bytes_by_kind(recorded), bytes_by_kind(compiled)
    if name in UNKNOWN:
        assert found.keys() == wanted.keys()
    elif name in MERGED:
        assert found.keys() == wanted.keys()
        assert wanted <= found
    else:
        assert found == wanted
