"""A call on its way to another process: the function by its name, its arguments by value.

A process that gets it imports the function's module, from the caller's `sys.path`, or from the module's file where that is
not the one on the path: pytest's test files, and those that are imported under a name of their own. Functions of the script
itself (``__main__``) are found too: `multiprocessing` imports the script in each worker, hence the usual
``if __name__ == "__main__":``.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


def name_of(function: Callable[..., Any]) -> str:
    """What errors call a function: ``test_layers.check_norm``."""
    whole: Any = _unwrapped(function)
    name = getattr(whole, "__qualname__", type(whole).__qualname__)
    return f"{_module_of(whole)}.{name}"


def encoded(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call, for `decoded` in another process.

    Raises:
        TypeError: The function can't be found by its name there, or an argument can't be pickled.
    """
    _check_importable(function)
    module = sys.modules.get(_module_of(_unwrapped(function)))
    home = (module.__name__, getattr(module, "__file__", None)) if module is not None else ("", None)
    try:
        call = pickle.dumps((function, args))
    except Exception as error:  # what an argument's own pickling raises
        raise TypeError(
            f"the arguments of {name_of(function)} can't be sent to other processes ({error}): pass what pickle takes, "
            "tensors, numbers, strings, dataclasses, and make models and registries in the function"
        ) from error
    return pickle.dumps((sys.path, home, call))


def decoded(message: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments, in the process that runs it."""
    path, (module, file), call = pickle.loads(message)
    sys.path[:] = path
    if file is not None and module != "__main__":
        _import(module, file)
    function, args = pickle.loads(call)
    return function, args


def result_of(value: object, function: Callable[..., Any]) -> bytes:
    """What a rank returned, to be read with `pickle`.

    Raises:
        TypeError: It can't be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{name_of(function)} returned {type(value).__name__}, which can't be sent back ({error}): return what pickle "
            "takes, tensors, numbers, strings, dataclasses"
        ) from error


def _check_importable(function: Callable[..., Any]) -> None:
    whole: Any = _unwrapped(function)
    name, module = getattr(whole, "__qualname__", ""), _module_of(whole)
    if "<" in name:
        what = "a lambda" if name.endswith("<lambda>") else f"defined within {name.partition('.<locals>')[0]}"
        raise TypeError(
            f"{module}.{name} is {what}: other processes find functions by their names. Define it with def at the top of "
            "its module, and pass what it uses as arguments"
        )
    main: Any = sys.modules.get("__main__")
    if module == "__main__" and getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None:
        raise TypeError(
            f"{name} is defined in an interactive session, a notebook or by python -c, which other processes can't import: "
            "write it into a file and import it from there"
        )


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _module_of(function: object) -> str:
    return getattr(function, "__module__", None) or type(function).__module__


def _import(name: str, file: str) -> None:
    """Make sure that ``name`` is the module of this file."""
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a package that isn't on the path
        spec = None
    if spec is not None and spec.origin == file:
        return  # pickle imports it
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
