"""The messages of the library, read from its sources: what users are told, and where it stands.

A message is what an exception is created with, what `warnings.warn` says, or what a function of
`plurax.errors` returns. Of

    listed = " or ".join(fits)
    raise errors.PlanError(f"data={data} does not fit{where}: {listed}")

the text is `data={data} does not fit{where}: {listed}`; literals below names that it reads, in the
same function or at the top of the module, belong to it, as pieces.
"""

import ast
import builtins
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "plurax"
FOR_OURSELVES = ("AssertionError", "SystemExit")


@dataclass(frozen=True)
class Message:
    """What is said, by a function of a module.

    **Arguments:** `pieces`, by name, what the text reads that has words of its own; `words`, the
    literals of both.
    """

    where: str
    kind: str
    text: str
    pieces: dict[str, list[str]]
    words: list[str]

    def __str__(self):
        pieces = [f"  {name} = {text}" for name, texts in self.pieces.items() for text in texts]
        return "\n".join([f"{self.kind}: {self.text}".rstrip(), *pieces])


def all_messages() -> list[Message]:
    """Return every message, in the order of the sources."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    kinds = _kinds(trees.values())
    return [
        message
        for path, module in trees.items()
        for message in _of_module(path.relative_to(SOURCE).as_posix(), module, kinds)
    ]


def _kinds(modules) -> set[str]:
    """Return the names of the exceptions and warnings: those of Python, and ours."""
    known = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    classes = [
        node for tree in modules for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    for _ in range(3):  # as deep as they derive from each other
        known |= {one.name for one in classes if known & {_last(base) for base in one.bases}}
    return known.difference(FOR_OURSELVES)


def _of_module(path: str, module: ast.Module, kinds: set[str]) -> Iterator[Message]:
    for name, function in _functions(module):
        for kind, node in _said(function, kinds, path.startswith("errors/")):
            pieces: dict[str, list[ast.expr]] = {}
            _follow(node, function, module, pieces)
            parts = itertools.chain([node], *pieces.values())
            strings = [text for part in parts for text in _literals(part)]
            if any(" " in text for text in strings):
                said = {key: [_text(value) for value in values] for key, values in pieces.items()}
                yield Message(f"{path} {name}", kind, _text(node), said, strings)


def _functions(node: ast.AST, names: tuple[str, ...] = ()):
    """Yield each function that stands in a module or a class, with its name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ".".join([*names, child.name]), child
        else:
            inner = (*names, child.name) if isinstance(child, ast.ClassDef) else names
            yield from _functions(child, inner)


def _said(function: ast.AST, kinds: set[str], returned: bool):
    """Yield what a function says: the kind of message, and the expression of its text."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.args:
            name = _last(node.func)
            if name == "warn":
                yield (_last(node.args[1]) if len(node.args) > 1 else "UserWarning"), node.args[0]
            elif name in kinds:
                yield name, node.args[0]
        elif returned and isinstance(node, ast.Return) and _last(node.value) not in kinds:
            yield "str", node.value


def _follow(node: ast.AST, function: ast.AST, module: ast.Module, pieces: dict) -> None:
    """Collect in `pieces` what the names in an expression stand for, where that has words."""
    for name in {_last(part): None for part in ast.walk(node)}:
        if name is None or name in pieces:
            continue
        values = [*_assigned(name, function)] or [*_assigned(name, module, deep=False)]
        values = [value for value in values if any(map(str.strip, _literals(value)))]
        if values:
            pieces[name] = values
            for value in values:
                _follow(value, function, module, pieces)


def _assigned(name: str, scope: ast.AST, deep: bool = True):
    """Yield what a name is assigned in a function, or a function of that name returns."""
    for node in ast.walk(scope) if deep else [*scope.body, *_methods(scope)]:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield value
            case (
                ast.AugAssign(target=ast.Name(id=target), value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
            ) if target == name:
                yield value
            case ast.FunctionDef(name=target, returns=ast.Name(id="str")) if target == name:
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield inner.value


def _methods(module):
    return [inner for node in module.body if isinstance(node, ast.ClassDef) for inner in node.body]


def _last(node) -> str | None:
    """Return the name of what an expression reads or calls, without its module."""
    match node:
        case ast.Call():
            return _last(node.func)
        case ast.Attribute():
            return node.attr
        case ast.Name():
            return node.id
    return None


def _literals(node: ast.AST) -> Iterator[str]:
    """Yield the literals with letters of an expression, but for keys, which nobody reads."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and any(map(str.isalpha, node.value)):
            yield node.value
    elif isinstance(node, ast.Subscript):
        yield from _literals(node.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _literals(child)


def _text(node: ast.AST) -> str:
    """Return a text with what it computes in braces."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(map(_text, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
            how = f"!{chr(conversion)}" if conversion >= 0 else ""
            return f"{{{_code(value)}{how}{f':{_text(spec)}' if spec else ''}}}"
    return f"{{{_code(node)}}}"


class _Plain(ast.NodeTransformer):
    """An f-string within an expression as its text: Python's versions quote it differently."""

    def visit_JoinedStr(self, node):
        return ast.Constant(_text(node))


def _code(node: ast.AST) -> str:
    return ast.unparse(_Plain().visit(ast.parse(ast.unparse(node), mode="eval")))
