"""The parameters of a flow as one pydantic model: Prefect's form, the command line's options and the checks.

A field is a parameter: its type, range, default and the text below it stand in the form and in the help, and a value
that does not fit is refused in one line that says the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import core_schema

from heterps_core.errors import ConfigurationError, UnknownNameError

KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a JSON object",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minItems": "length at least",
}

REMOVED = {
    "output": "MLflow shows the plans of a comparison side by side, and the run's last line says where",
    "nights": "profile-devices measures each device type that has no measurement of the last 30 days",
    "region": "regions names where machines may be rented, such as regions=['eu-west-1']",
    "redo_log": "checkpoints, as often as the market's losses make worth it, are what a run goes on from",
    "leave_out_costs": "every plan is charged what its run costs; `heterps plan` shows each term as a line",
    "robust": "each time has its spread in the plan's explanation, and profile-devices measures device types",
}
"""Parameters of earlier versions, and what stands in their place."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class OneOf:
    """Marks text that must be one of some names."""

    family: str
    known: Collection[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Refuse other names."""
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        """Let the form offer the names."""
        return {**handler(schema), "enum": sorted(self.known)}

    def _known(self, name: str) -> str:
        if name not in self.known:
            raise UnknownNameError(self.family, name, self.known)
        return name


class FlowParameters(BaseModel):
    """Parameters of a flow; this base is that of a flow that takes none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @classmethod
    def of(cls, values: Mapping[str, Any], *, place: str = "") -> Self:
        """Return the parameters with these values and defaults for the others; "2" is a number where one is asked.

        Args:
            place: Where they stand, for the message, such as " in HETERPS_NIGHTLY".

        Raises:
            UnknownNameError: There is no such parameter, or a name is in no registry.
            ConfigurationError: A value has another type, or is out of its range, or the parameter was removed.
        """
        for name in values:
            if name in cls.model_fields:
                continue
            if name in REMOVED:
                raise ConfigurationError(f"{name}{place} was removed: {REMOVED[name]}; leave it out")
            raise UnknownNameError(f"parameter{place}", name, cls.model_fields)
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise ConfigurationError(
                f"{name}{place} must be {_rule(cls.form()[name])}, got {first['input']!r}"
            ) from error

    def check(self) -> None:
        """Check what needs files, prices or other parameters, before any work or record begins."""

    def values_for(self, part: type[Any]) -> dict[str, Any]:
        """Return the values of the parameters that a dataclass or another model has fields for."""
        names = part.model_fields if issubclass(part, BaseModel) else [field.name for field in fields(part)]
        return {name: getattr(self, name) for name in names if name in type(self).model_fields}

    @classmethod
    def form(cls) -> dict[str, dict[str, Any]]:
        """Return for each parameter the JSON schema of its values other than None."""
        schemas: dict[str, dict[str, Any]] = cls.model_json_schema().get("properties", {})
        return {
            name: schema | next((each for each in schema.get("anyOf", ()) if each["type"] != "null"), {})
            for name, schema in schemas.items()
        }


def _rule(form: Mapping[str, Any]) -> str:
    """Return what values must be by their JSON schema, such as "a number of USD/hour, above 0, or left out"."""
    unit = f" of {form['unit']}" if "unit" in form else ""
    bounds = " and ".join(f"{word} {form[key]}" for key, word in BOUNDS.items() if key in form)
    items = f", each {_rule(form['items'])}" if "items" in form else ""
    left_out = ", or left out" if "anyOf" in form else ""
    return KINDS[form["type"]] + unit + (f", {bounds}" if bounds else "") + items + left_out


def _in_one_line(text: str | None) -> str:
    return " ".join((text or "").split())


Parameters = TypeVar("Parameters", bound=FlowParameters)


def takes(
    model: type[Parameters],
) -> Callable[[Callable[[Parameters], Result]], Callable[..., Result]]:
    """Give a function of a model the model's fields as parameters, and check them when it is called.

    Prefect makes its form of a function's signature and docstring.
    """

    def with_fields(function: Callable[[Parameters], Result]) -> Callable[..., Result]:
        def flat(**values: Any) -> Result:
            asked = model.of(values)
            asked.check()
            return function(asked)

        described = (
            f"    {name}: {_in_one_line(field.description)}" for name, field in model.model_fields.items()
        )
        flat.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Args:", *described])
        flat.__module__, flat.__name__, flat.__qualname__ = (
            function.__module__,
            function.__name__,
            function.__qualname__,
        )
        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.is_required() else field.default,
                    annotation=Annotated[
                        field.annotation,
                        *field.metadata,
                        Field(json_schema_extra=field.json_schema_extra),
                    ],
                )
                for name, field in model.model_fields.items()
            ]
        )
        return flat

    return with_fields
