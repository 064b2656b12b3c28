"""pydantic's errors as problems with a place, a code and the nearest valid key."""

from __future__ import annotations

from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from fabrictool.base.docstrings import attribute_docstrings
from fabrictool.base.errors import Place, Problem
from fabrictool.base.ids import NAME_PATTERN
from fabrictool.blueprint.tree import describe, dotted
from fabrictool.domain.architectures import MODEL_ID

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic_core import ErrorDetails, ValidationError

    from fabrictool.blueprint.tree import Steps, YamlNode

MIN_PREFIX = 3
"""Letters of a word that is taken for the beginning of a longer one."""
_EXPECTED = {
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
_FORMS = {
    NAME_PATTERN: ("a name", "small letters, digits, `.`, `_` and `-`, at most 63, letters or digits at both ends"),
    MODEL_ID: ("the id of a model", "write ORGANISATION/NAME, as Hugging Face does, such as moonshotai/Kimi-K2.5"),
}


def problems_of(error: ValidationError, root: YamlNode, model: type[BaseModel]) -> list[Problem]:
    """One problem per place and code, in the order of the files."""
    problems: dict[tuple[Place, str], Problem] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and _long_enough(detail, root):
            continue  # its entries have complaints of their own, and are only therefore not counted
        problem = _problem(detail, root, model)
        key = (problem.place if problem.code == "FT1101" else _position(problem.place), problem.code)
        problems.setdefault(key, problem)
    return in_order(problems.values())


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """By file, line and column; same input, same order."""
    return sorted(
        problems, key=lambda p: (p.place.file or "", p.place.line or 0, p.place.column or 0, p.code, p.message)
    )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    names = sorted(known)
    folded = {name.lower(): name for name in names}
    if word.lower() in folded:
        return folded[word.lower()]
    close = get_close_matches(word.lower(), list(folded), 1, 0.6)
    if close:
        return folded[close[0]]
    starts = [name for name in names if len(word) >= MIN_PREFIX and name.lower().startswith(word.lower())]
    return starts[0] if len(starts) == 1 else None


def choices(known: Iterable[str], limit: int = 12) -> str:
    """The known names for a hint, cut where the list grows long."""
    names = sorted(known)
    if not names:
        return "there is none"
    return ", ".join(names[:limit]) + (f" … ({len(names)} in all)" if len(names) > limit else "")


def meant(word: str, known: Iterable[str], what: str = "known") -> str:
    """``did you mean `x`?``, or all the names."""
    names = sorted(known)
    starts = [name for name in names if len(word) >= MIN_PREFIX and name.startswith(word)]
    if 1 < len(starts) <= 4:
        return f"did you mean {', '.join(f'`{name}`' for name in starts[:-1])} or `{starts[-1]}`?"
    near = nearest(word, names)
    return f"did you mean `{near}`?" if near else f"{what}: {choices(names)}"


def _position(place: Place) -> Place:
    return Place(place.file, place.line, place.column)


def _problem(detail: ErrorDetails, root: YamlNode, model: type[BaseModel]) -> Problem:
    kind, path = detail["type"], tuple(detail["loc"])
    context: dict[str, Any] = detail.get("ctx") or {}
    node, known = root.nearest(path)
    subject = dotted(known)
    if kind == "extra_forbidden":
        return _unknown_key(node, known, model)
    if kind == "missing":
        return _missing(node, known, path, model)
    place = node.place(subject)
    if kind.startswith("FT"):
        if kind == "FT1118":
            place = masked(place)
        return Problem(kind, f"{subject}: {context['text']}", place, context["hint"] or None)
    if kind in _EXPECTED:
        return _wrong_kind(kind, node, subject, place)
    value = node.written
    if kind == "literal_error":
        allowed = _allowed(str(context["expected"]))
        return Problem(
            "FT1104", f"{subject}: `{value}` is not one of the values", place, meant(value, allowed, "one of")
        )
    if kind == "string_pattern_mismatch":
        named = path[-1:] == ("[key]",)
        if named:
            value, place = str(path[-2]), node.key_place(subject)
        what, hint = _FORMS.get(context["pattern"], _FORMS[NAME_PATTERN])
        return Problem("FT1106", f"{subject}: `{value[:80]}` is not {what}", place, hint)
    if kind in ("too_short", "too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        bound = f"at least {least}" if kind == "too_short" else f"at most {most}"
        count = len(node.value) if isinstance(node.value, dict | list) else 0
        return Problem("FT1107", f"{subject}: {bound} needed, {count} found", place, None)
    return Problem("FT1105", f"{subject}: {_range_text(detail)}", place, None)


def _long_enough(detail: ErrorDetails, root: YamlNode) -> bool:
    node, _ = root.nearest(tuple(detail["loc"]))
    least = (detail.get("ctx") or {}).get("min_length", 0)
    return isinstance(node.value, dict | list) and len(node.value) >= least


def masked(place: Place) -> Place:
    """Without the value in the line: it may be a secret that must not reach a log."""
    if place.source_line is None or place.column is None:
        return place
    line = place.source_line[: place.column - 1] + "********"
    return Place(place.file, place.line, place.column, place.thing, line, 8)


def _unknown_key(node: YamlNode, path: Steps, model: type[BaseModel]) -> Problem:
    key, parent = str(path[-1]), path[:-1]
    known = _fields(model, parent)
    where = f"`{dotted(parent)}` has" if parent else "the document has"
    return Problem("FT1101", f"{where} no key `{key}`", node.key_place(dotted(path)), meant(key, known, "its keys are"))


def _missing(node: YamlNode, known: Steps, path: Steps, model: type[BaseModel]) -> Problem:
    key = str(path[-1])
    what = f"`{dotted(known)}`" if known else "the document"
    hint = f"add `{key}: …`"
    field = _model_at(model, known)
    if field is not None and key in field.model_fields:
        text = field.model_fields[key].description or attribute_docstrings(field).get(key, "")
        about = text.replace("``", "`").strip()
        hint = f"add `{key}: …`: {about[:1].lower()}{about[1:].rstrip('.')}" if about else hint
    place = node.key_place(dotted(known)) if known else node.source.place(node.line, node.column)
    return Problem("FT1102", f"{what} lacks `{key}`", place, hint)


def _wrong_kind(kind: str, node: YamlNode, subject: str, place: Place) -> Problem:
    expected = _EXPECTED[kind]
    hint = None
    if expected == "text" and isinstance(node.value, int | float):
        hint = f'write it in quotes: "{node.written}"'
    elif expected == "a list" and isinstance(node.value, str | int | float):
        hint = f"write [{node.written}]"
    elif expected == "a whole number" and isinstance(node.value, str):
        hint = "write the number without quotes and without a unit"
    elif expected == "a mapping" and isinstance(node.value, str):
        hint = "write `name: value` pairs, indented below the key or in braces"
    return Problem("FT1103", f"{subject}: expected {expected}, found {describe(node.value)}", place, hint)


def _range_text(detail: ErrorDetails) -> str:
    context: dict[str, Any] = detail.get("ctx") or {}
    for name, text in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if name in context:
            return f"must be {text} {context[name]}"
    if detail["type"] == "string_too_short":
        return "must not be empty"
    if detail["type"] == "string_too_long":
        return f"longer than {context.get('max_length')} characters"
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _allowed(expected: str) -> list[str]:
    return [part.strip().strip("'") for part in expected.replace(" or ", ",").split(",")]


def _fields(model: type[BaseModel], path: Steps) -> list[str]:
    schema = _model_at(model, path)
    return list(schema.model_fields) if schema is not None else []


def _model_at(model: type[BaseModel], path: Steps) -> type[BaseModel] | None:
    """The class of the mapping at `path`, if it is one of ours."""
    here: Any = model
    for step in path:
        here = _model_in(here)
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(step))
            if field is None:
                return None
            here = field.annotation
        else:
            arguments = [a for a in get_args(here) if a is not Ellipsis]
            if not arguments:
                return None
            here = arguments[-1]
    here = _model_in(here)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _model_in(annotation: Any) -> Any:
    """Without ``Annotated`` and ``| None``."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, UnionType):
            rest = [a for a in get_args(annotation) if a is not type(None)]
            if len(rest) != 1:
                return annotation
            annotation = rest[0]
        else:
            return annotation
