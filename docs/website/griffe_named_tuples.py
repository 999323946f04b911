"""A griffe extension that shows the fields of a NamedTuple as arguments; griffe itself does so for dataclasses."""

from __future__ import annotations

from typing import Any

from griffe import Class, Extension, Function, Parameter, ParameterKind, Parameters


class NamedTuples(Extension):  # type: ignore[misc]  # (the type checks run without griffe)
    """Add the constructor of each ``class X(NamedTuple)``."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Add ``__init__`` with one parameter per annotated field, if the class is a NamedTuple."""
        if "__init__" in cls.members or not any(str(base).endswith("NamedTuple") for base in cls.bases):
            return
        fields = [
            Parameter(name, annotation=field.annotation, kind=ParameterKind.positional_or_keyword, default=field.value)
            for name, field in cls.attributes.items()
            if field.annotation is not None
        ]
        init = Function("__init__", parameters=Parameters(Parameter("self"), *fields), parent=cls, lineno=cls.lineno)
        cls.set_member("__init__", init)
