"""Frozen dataclasses as plain JSON values and back by their type hints, with the rules that stand in these.

A hint such as `Annotated[int, count(64)]` or `Positive` (`field_rules.py`) states the rule of a field. Errors carry
the field's path, the rule and the value. Numbers stay as they are written, fields that are not known are ignored,
and a field with a default may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from heterps_core.errors import ConfigurationError, MalformedDocumentError
from heterps_core.field_rules import Rule, shown
from heterps_core.json_file import read_json
from heterps_core.toml_file import SUFFIX, read_toml

_Kind = TypeVar("_Kind")
_PLAIN = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", NoneType: "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonForm:
    """Properties of the JSON form of a class beside its fields."""

    what: str = "document"
    """For messages, like `way_out`: what to do with a document that cannot be read."""

    way_out: str = ""
    version: int | None = None
    version_name: str = "schema_version"
    sums: tuple[str, ...] = ()
    """Properties that are written for readers, and not read."""

    omits_defaults: bool = False
    is_strict: bool = False
    """A field that is not known is refused."""

    former_names: tuple[str, ...] = ()
    """Fields of documents of before that are ignored."""

    toml_table: str = ""
    """Table of a TOML file that may hold it in place of a JSON file."""


_PLAIN_FORM = JsonForm()


class JsonDocument:
    """Base of frozen dataclasses with a JSON form: their fields by name."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    json_form: ClassVar[JsonForm] = _PLAIN_FORM

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        form = self.json_form
        document = {} if form.version is None else {form.version_name: form.version}
        for field in fields(self):
            value = getattr(self, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if not (form.omits_defaults and value == default):
                document[field.name] = to_json(value)
        return document | {name: getattr(self, name) for name in form.sums}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Read the JSON form.

        Raises:
            MalformedDocumentError: The version is another one, or a field is missing or breaks its rule.
            ConfigurationError: Fields do not fit together.
        """
        return from_json(cls, document)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of the JSON form, or its table of a TOML file.

        Raises:
            ConfigurationError: The file cannot be read.
            MalformedDocumentError: It is no JSON or TOML, or breaks a rule; carries the file.
        """
        form = cls.json_form
        document: object
        if form.toml_table and path.suffix == SUFFIX:
            tables = read_toml(path, what=form.what)
            if form.toml_table not in tables:
                raise MalformedDocumentError(str(path), f"must hold a table [{form.toml_table}]")
            document = tables[form.toml_table]
        else:
            document = read_json(path, what=form.what)
        try:
            return cls.from_json(document)
        except ConfigurationError as error:
            raise MalformedDocumentError(str(path), str(error)) from error


def to_json(value: Any) -> Any:
    """Return a value, with all that dataclasses and containers hold, as plain JSON values."""
    if isinstance(value, JsonDocument):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value.value if isinstance(value, Enum) else value


def from_json(kind: type[_Kind], document: object) -> _Kind:
    """Return an object of a dataclass from its JSON form; raises as `JsonDocument.from_json`."""
    hint: Any = kind
    try:
        read: _Kind = _reader(hint)("", document)
    except MalformedDocumentError as error:
        form: JsonForm = getattr(kind, "json_form", _PLAIN_FORM)
        if not form.way_out:
            raise
        raise MalformedDocumentError(
            f"{form.what}: {error.field}", f"{error.problem}; {form.way_out}"
        ) from error
    return read


def check_fields(value: Any, path: str = "") -> None:
    """Check the rules of all fields of a dataclass's object, and of what these hold."""
    kind: Any = type(value)
    _reader(kind)(path, value)


def _as_object(path: str, value: object) -> Mapping[str, Any]:
    """Return a value that is a JSON object."""
    if not isinstance(value, dict | Mapping):
        raise MalformedDocumentError(path, f"must be a JSON object, got {shown(value)}")
    return value


def _member(document: Mapping[str, Any], path: str, name: str) -> Any:
    """Return the field of this name of the object at a path."""
    if name not in document:
        raise MalformedDocumentError(f"{path}.{name}" if path else name, "is missing")
    return document[name]


@cache
def _reader(hint: Any) -> Rule:
    """Return what checks a value, as JSON has it or as it is kept already, and returns it as a type hint says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rule: Rule = arguments[1]
        # The rules of plain values check their types too.
        return partial(_read_ruled, _reader(arguments[0]), rule) if get_args(arguments[0]) else rule
    if origin in (Union, UnionType) and not set(arguments) <= _PLAIN.keys():
        (kind,) = (kind for kind in arguments if kind is not NoneType)
        return partial(_read_optional, _reader(kind))
    if origin is tuple:
        return partial(
            _read_tuple, [_reader(kind) for kind in arguments if kind is not ...], ... in arguments
        )
    if origin is Mapping:
        return partial(_read_mapping, _reader(arguments[0]), _reader(arguments[1]))
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return partial(_read_object, hint, [(field, _reader(hints[field.name])) for field in fields(hint)])
    if isinstance(hint, type) and issubclass(hint, Enum | datetime):
        return partial(_read_named, hint)
    return partial(_read_plain, arguments or (hint,))


def _read_ruled(read: Rule, rule: Rule, path: str, value: Any) -> Any:
    return rule(path, read(path, value))


def _read_optional(read: Rule, path: str, value: Any) -> Any:
    return None if value is None else read(path, value)


def _read_tuple(readers: list[Rule], is_open: bool, path: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not (is_open or len(value) == len(readers)):
        size = "" if is_open else f" of {len(readers)}"
        raise MalformedDocumentError(path, f"must be a list{size}, got {shown(value)}")
    kinds = readers * len(value) if is_open else readers
    return tuple(read(f"{path}[{index}]", value[index]) for index, read in enumerate(kinds))


def _read_mapping(read_name: Rule, read: Rule, path: str, value: Any) -> dict[str, Any]:
    items = _as_object(path, value).items()
    return {read_name(path, name): read(f"{path}.{name}", item) for name, item in items}


def _read_object(kind: Any, members: Sequence[tuple[Field[Any], Rule]], path: str, value: Any) -> Any:
    prefix = f"{path}." if path else ""
    if isinstance(value, kind):
        for field, read in members:
            read(prefix + field.name, getattr(value, field.name))
        return value
    form: JsonForm = getattr(kind, "json_form", _PLAIN_FORM)
    document = _as_object(path or form.what, value)
    if form.version is not None:
        version = _member(document, path, form.version_name)
        if version != form.version or isinstance(version, bool):
            rule = f"must be {form.version}, got {shown(version)}"
            raise MalformedDocumentError(prefix + form.version_name, rule)
    known = [field.name for field, _ in members]
    for name in document if form.is_strict else ():
        if name not in (*known, *form.former_names, form.version_name):
            raise MalformedDocumentError(
                prefix + name, f"is not a known field; known are: {', '.join(known)}"
            )
    return kind(
        **{
            field.name: read(prefix + field.name, _member(document, path, field.name))
            for field, read in members
            if field.name in document or field.default is field.default_factory is MISSING
        }
    )


def _read_plain(kinds: tuple[type, ...], path: str, value: Any) -> Any:
    if isinstance(value, kinds) if type(value) is not bool else bool in kinds:
        return value
    if float in kinds and type(value) is int:
        return value
    names = " or ".join(_PLAIN[kind] for kind in kinds)
    raise MalformedDocumentError(path, f"must be {names}, got {shown(value)}")


def _read_named(kind: Any, path: str, value: Any) -> Any:
    """Read an enum by its value, or a time."""
    if isinstance(value, kind):
        return value
    try:
        return datetime.fromisoformat(value) if kind is datetime else kind(value)
    except (TypeError, ValueError):
        names = "a time as in ISO 8601" if kind is datetime else f"one of {', '.join(kind)}"
        raise MalformedDocumentError(path, f"must be {names}, got {shown(value)}") from None
