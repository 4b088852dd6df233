"""MaxText's `train_compile` in a process of its own: what it compiled, as JSON in a folder.

    python -m benchmarks.workers.maxtext_compile FOLDER setting=value ...

`answer.json` has the text of the program, its memory and the operations that the compiler counts,
the number of parameters, and the seconds of compiling. `benchmarks.maxtext` reads it.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext.configs
from maxtext.trainers.pre_train import train_compile

from plurax.hlo.memory import memory


def main(folder: Path, settings: list[str]) -> None:
    """Run `train_compile`, and write down what its own `jit_and_compile` returns."""
    compile_step = train_compile.jit_and_compile

    def write(function: Any, arguments: Any, *rest: Any, **more: Any) -> Any:
        started = time.perf_counter()
        compiled = compile_step(function, arguments, *rest, **more)
        answer = {
            "seconds": time.perf_counter() - started,
            "text": compiled.as_text(),
            "memory": dataclasses.asdict(memory(compiled)),
            "flops": compiled.cost_analysis()["flops"],
            "parameters": parameters(arguments[0]),
        }
        (folder / "answer.json").write_text(json.dumps(answer))
        return compiled

    train_compile.jit_and_compile = write
    config = Path(maxtext.configs.__file__).parent / "base.yml"
    output = f"base_output_directory={folder}"
    train_compile.main(["train_compile", str(config), output, *settings])


def parameters(state: Any) -> int:
    """Return the number of parameters of a state; beside them a model has keys and counters."""
    leaves = jax.tree.leaves(state["model"])
    return sum(math.prod(leaf.shape) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
