"""What a transformer is given, in NumPy: the same numbers for every framework."""

from typing import Any

import numpy as np

from benchmarks.sizes import Transformer


def tokens(network: Transformer, size: int) -> np.ndarray:
    """Random texts, one token longer than the network reads."""
    shape = (size, network.length + 1)
    return np.random.default_rng(0).integers(0, network.vocabulary, shape, np.int32)


def params(network: Transformer) -> dict[str, Any]:
    """First parameters of the stack: `embed`, `blocks` with a leading dim of layers, `head`."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return np.float32(0.02) * rng.standard_normal(shape, np.float32)

    return {
        "embed": {"embedding": normal(network.vocabulary, network.width)},
        "blocks": {
            name: normal(network.layers, *shape) for name, shape in block_shapes(network).items()
        },
        "head": {"output": normal(network.width, network.vocabulary)},
    }


def block_shapes(network: Transformer) -> dict[str, tuple[int, int]]:
    """The weights of a layer, each `(in, out)`."""
    width = network.width
    return {
        "query": (width, width),
        "key": (width, width),
        "value": (width, width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
