"""Base class of every section of the config."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")
_ADJUSTABLE = "adjustable"
Adjustable = Annotated[T, _ADJUSTABLE]
"""Mark a setting that may differ after a resume: it affects how far or on which machines a run continues, not its
results."""


class Section(BaseModel):
    """A frozen part of the config that refuses unknown keys. The docstring under a field is its text in
    docs/config.md."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def adjustable(cls) -> list[str]:
        """Return the names of the settings that may differ after a resume."""
        return [name for name, field in cls.model_fields.items() if _ADJUSTABLE in field.metadata]

    def fixed(self) -> dict[str, Any]:
        """Return the settings that must be the same after a resume, as JSON values."""
        tree = self.model_dump(mode="json", exclude=set(self.adjustable()))
        sections = {name: value.fixed() for name in tree if isinstance(value := getattr(self, name), Section)}
        return tree | sections
