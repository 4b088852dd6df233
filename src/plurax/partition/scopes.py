"""The scopes in which the partitioner emits collectives: they say what each is for.

A recorded collective is an equation such as `psum`, which has the line of the model but not the
operation for which it was inserted. Its scope has:

    `for:[sort in attention]:`                       a gather: `sort` needs its operand whole
    `for:[custom in attention]:[model.py:7 (f)]:`    the operation has no rule; its line
    `by_hand:[shard_map]:`                           the model's own, in a `jax.shard_map`
    `if_uneven:[turns]:`                             a loop that runs for few batches
"""

import re

BY_HAND = "by_hand:[shard_map]:"
"""The scope of what a model computes in a `jax.shard_map` of its own."""


IF_UNEVEN = "if_uneven:[turns]:"
"""The scope of a loop that does not run for a batch that is routed evenly, and in no estimate."""


def reason_scope(operation: str, line: str | None) -> str:
    """Return the name of a scope in which an operand of an equation is resharded.

    `operation` is as `Collective.operation`, and not empty; `line` is that of the model's code if
    the operation has no rule.
    """
    return f"for:[{operation}]:" + ("" if line is None else f"[{line}]:")


def reason_of(scopes: str) -> tuple[str, tuple[str, str] | None]:
    """Return `operation` and `without_rule` of a collective that was traced in some scopes.

    >>> reason_of(f"jit(step)/jvp({reason_scope('sort in layers[0]', None)})")
    ('sort in layers[0]', None)
    >>> reason_of(reason_scope("custom in attention", "model.py:7 (f)"))
    ('custom in attention', ('custom', 'model.py:7 (f)'))
    """
    reason = re.search(r"for:\[(.*?)\]:(?:\[(.*?)\]:)?", scopes)
    if reason is None:
        return "", None
    operation, line = reason[1], reason[2]
    return operation, None if line is None else (operation.split(" in ")[0], line)
