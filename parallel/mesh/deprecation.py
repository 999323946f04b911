"""Decorators and functions that keep former public names valid. Using such a name issues a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

AnyClass = TypeVar("AnyClass", bound=type)
AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])


def warn_deprecated(old: str, advice: str) -> None:
    """Issue the DeprecationWarning ``{old} is deprecated: {advice}`` at the line of user code that called this package."""
    warnings.warn(f"{old} is deprecated: {advice}", DeprecationWarning, stacklevel=level_of_caller())


def renamed_objects(module: str, renamed: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module, which warns about former names and returns the renamed objects."""

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        if not is_called_by_importlib():  # ``from module import name`` reads the name twice; importlib reads it first
            warn_deprecated(f"{module}.{name}", f"write {new.__name__} instead")
        return new

    return find


def renamed_members(**renamed: str) -> Callable[[AnyClass], AnyClass]:
    """Return a class decorator that adds the former names of renamed attributes and methods to the class.

        @renamed_members(parted="replicas_diverged")
        class GradStats: ...

    Reading or setting a former name reads or sets the attribute with the new name, and issues a DeprecationWarning. If
    a subclass defines only a former name, its definition also overrides the method or attribute with the new name;
    defining the subclass issues the warning. In such an override, ``super()`` with the former name issues no warning.
    """

    def decorate(cls: Any) -> Any:
        own = cls.__dict__.get("__init_subclass__")

        def adopt_overrides(subclass: Any, /, **options: Any) -> None:
            if own is None:
                super(cls, subclass).__init_subclass__(**options)
            else:
                own.__func__(subclass, **options)
            for old, new in renamed.items():
                if old in vars(subclass) and new not in vars(subclass):
                    setattr(subclass, new, vars(subclass)[old])
                    warn_deprecated(f"{subclass.__name__}.{old}", f"write {new} instead")

        cls.__init_subclass__ = classmethod(adopt_overrides)
        for old, new in renamed.items():
            setattr(cls, old, _FormerMember(cls, old, new))
        return cls

    return decorate


class _FormerMember:
    """Descriptor for a former name: it gets or sets the attribute with the new name, and issues a warning."""

    def __init__(self, owner: type, old: str, new: str) -> None:
        self.owner, self.old, self.new = owner, old, new

    def __get__(self, instance: Any, cls: type) -> Any:
        if instance is not None:
            overriding = [base for base in cls.__mro__ if self.old in vars(base) and base is not self.owner]
            if overriding:  # a method of a subclass with the former name calls the method of its base class by `super`
                return getattr(super(overriding[-1], instance), self.new)
        warn_deprecated(f"{self.owner.__name__}.{self.old}", f"write {self.new} instead")
        return getattr(cls if instance is None else instance, self.new)

    def __set__(self, instance: Any, value: Any) -> None:
        warn_deprecated(f"{self.owner.__name__}.{self.old}", f"write {self.new} instead")
        setattr(instance, self.new, value)


def renamed_fields(**renamed: str) -> Callable[[AnyClass], AnyClass]:
    """Return a decorator for dataclasses whose former field names stay valid, as attributes and in the constructor."""
    return lambda cls: renamed_members(**renamed)(renamed_arguments(**renamed)(cls))


def renamed_arguments(**renamed: str) -> Callable[[AnyCallable], AnyCallable]:
    """Return a decorator that lets a function, or the constructor of a class, accept former names of keyword arguments.

        @renamed_arguments(last="final")
        def step(closure=None, *, final=False): ...

    A call with both names of an argument raises TypeError.
    """

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            cls: Any = function
            cls.__init__ = decorate(cls.__init__)
            return cls
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def accept(*args: Any, **kwargs: Any) -> Any:
            for old in kwargs.keys() & renamed.keys() if kwargs else ():
                new, value = renamed[old], kwargs.pop(old)
                if new in kwargs:
                    raise TypeError(
                        f"{new} is given twice, as {new}={kwargs[new]!r} and as {old}={value!r}: leave {old} out, which is "
                        "deprecated"
                    )
                warn_deprecated(f"{name}({old}={value!r})", f"write {new}={value!r} instead")
                kwargs[new] = value
            return function(*args, **kwargs)

        return accept

    return decorate


# Stack frames ---------------------------------------------------------------------------------------------------------


def level_of_caller() -> int:
    """Return the ``stacklevel`` with which a warning of the calling function shows the line of user code.

    It is the line of the innermost frame outside meshstep, torch and the module ``abc``. Frames of torch are skipped
    because torch wraps the method `step` of optimizers, and frames of ``abc`` because it creates abstract classes.
    """
    skipped = (__name__.split(".")[0], "torch", "abc")
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in skipped:
        frame, level = frame.f_back, level + 1
    return level


def is_called_by_importlib() -> bool:
    """Return True if the innermost frame outside meshstep, torch and ``abc`` belongs to Python's importlib."""
    return sys._getframe(level_of_caller() - 1).f_globals.get("__name__") == "importlib._bootstrap"
