"""Public names of a package, each imported when it is first used.

A package's stub, `__init__.pyi`, is the one list of its public names: each line imports a name from
the module that defines it. Type checkers and editors read the stub; at run time the package reads
it too:

    pipeline/__init__.pyi    from plurax.pipeline.simulation import simulate as simulate
    pipeline/__init__.py     __getattr__, __dir__, __all__ = public_names(__name__, __file__)

    >>> import plurax as px
    >>> px.pipeline.simulate.__module__    # imports plurax.pipeline.simulation, now
    'plurax.pipeline.simulation'

So `import plurax` itself loads neither JAX nor any room, and importing one room loads no other for
the sake of its public names. This is "lazy loading" of Scientific Python's SPEC 1.

What is public is called by users, so here each function also learns to say which argument was wrong
(`argument_check`).
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def public_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    `package` is its name. The stub beside the file has only `from module import name as name`, and
    `from module import *` for what the library has there for itself.
    """
    modules = _names(Path(file).with_suffix(".pyi"))

    def get(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            said = f"module {package!r} has no attribute {name!r}"
            # Tools ask every object for such as `__wrapped__`: for these no stub is read.
            for stub in Path(file).parent.glob("*/__init__.pyi"):
                if not name.startswith("_") and name in _names(stub):
                    said += f"; it is {package}.{stub.parent.name}.{name}"
            raise AttributeError(said)
        if module == package:  # a package inside this one
            return importlib.import_module(f"{package}.{name}")
        importlib.import_module(module)
        _explain_all(package, modules)
        value = getattr(sys.modules[module], name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules), sorted(modules)


def _names(stub: Path) -> dict[str, str | None]:
    """Return the public names of a package, each with its module, from the package's stub."""
    body = ast.parse(stub.read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module for node in imports for alias in node.names}
    return {name: module for name, module in names.items() if name != "*"}


def _explain_all(package: str, modules: dict[str, str | None]) -> None:
    """Let the package's public functions and classes say which argument is wrong.

    Those of all modules that are imported: a user has a `Program` without ever naming the class.
    """
    from plurax.argument_check import explain

    for name, module in modules.items():
        loaded = sys.modules.get(module or "")
        if loaded is not None and module != package and hasattr(loaded, name):
            # In its own module, so that pickle finds it there by its name.
            setattr(loaded, name, explain(f"{package}.{name}", getattr(loaded, name)))


def imported(module: str, what: str, package: str, extra: str) -> Any:
    """Return a module that not every installation has.

    Raises `MissingPackageError`, which says for `what` it is needed, and what to install.
    """
    from plurax import errors

    try:
        return importlib.import_module(module)
    except ImportError:
        raise errors.package_missing(what, package, extra) from None
