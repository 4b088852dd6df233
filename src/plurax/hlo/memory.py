"""Read what a compiled program holds."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler reports them.

    That of TPUs reports more temporaries than it allocates and checks against the memory: what is
    lost between buffers twice, and of programs with loops up to half as much again (decision 0065).

    **Fields:** `arguments` (state and batch), `outputs`, `aliased` (outputs that reuse an
    argument's memory), `temporaries`, `code`; `peak` is arguments + outputs - aliased +
    temporaries + code, the most the program holds at once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The most the program holds at once on one device."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Return the memory of a compiled program, bytes on one device."""
    stats = compiled.memory_analysis()
    assert stats is not None, "this backend reports no memory"
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
