"""Loaded by mkdocs.yml: shows the fields of msgspec structs as what they are, the parameters of their constructors."""

from __future__ import annotations

from typing import Any

import griffe


class StructSignatures(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if not any(str(base) == "msgspec.Struct" for base in cls.bases):
            return
        kind = (
            griffe.ParameterKind.keyword_only
            if "kw_only" in cls.keywords
            else griffe.ParameterKind.positional_or_keyword
        )
        fields = [field for field in cls.attributes.values() if "property" not in field.labels and field.annotation]
        parameters = [griffe.Parameter(f.name, annotation=f.annotation, kind=kind, default=f.value) for f in fields]
        cls.set_member(
            "__init__", griffe.Function("__init__", parameters=griffe.Parameters(griffe.Parameter("self"), *parameters))
        )
