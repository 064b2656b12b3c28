"""Models that a blueprint describes itself: the catalogue's fields, one by one, as a part of the document.

The fields are those of `ModelArchitecture`, which is the only place where they are written: what stands here is made
from them, so that complaints, the editors' schema, the reference page and ``show`` know them like any other key.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import msgspec
from pydantic import Field, StringConstraints, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails

from fabrictool.catalog import ModelArchitecture
from fabrictool.domain.quantities import Document, Text, problem

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
"""ORGANISATION/NAME, as Hugging Face names models."""
ModelId = Annotated[str, StringConstraints(pattern=MODEL_ID, strict=True)]

_ELSEWHERE = frozenset({"id", "licence", "artifacts", "aliases", "released"})
"""Fields of a catalogue's entry that say nothing here: the id is the key, and a blueprint states its own variant."""
_ABSENT = {"published_parameters": 0, "source": "the blueprint"}
"""What the catalogue's own entries have to say and a blueprint's need not."""
_KINDS = {"source": Text}


class DescribedModel(Document):
    """A decoder-only language model as far as memory and time depend on it. ``fabrictool catalogue add`` writes one
    from a ``config.json``.
    """

    def catalogued(self, model_id: str) -> ModelArchitecture:
        """As an entry of the catalogue. Without a published number of parameters the counted one stands for it."""
        entry = _entry(self, model_id)
        if entry.published_parameters:
            return entry
        return msgspec.structs.replace(entry, published_parameters=entry.parameters)

    @model_validator(mode="after")
    def _possible(self) -> DescribedModel:
        wrong = [
            InitErrorDetails(
                type=problem("FT1280", f"`{field}` is {what}", "compare it with the model's config.json"),
                loc=(field,),
                input=self,
            )
            for field, what in _entry(self, "").contradictions()
        ]
        if wrong:
            raise ValidationError.from_exception_data("Architecture", wrong)
        return self


def _entry(described: DescribedModel, model_id: str) -> ModelArchitecture:
    fields = {"id": model_id, "licence": "", **described.model_dump()}
    return msgspec.convert(fields, ModelArchitecture)


def _fields() -> Mapping[str, Any]:
    """Name → (type with its bounds, default) for pydantic."""
    hints, meanings = get_type_hints(ModelArchitecture, include_extras=True), _meanings()
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(ModelArchitecture):
        if field.name in _ELSEWHERE:
            continue
        kind, *bounds = get_args(hints[field.name]) or (_KINDS.get(field.name, hints[field.name]),)
        limits = {name: getattr(bound, name) for bound in bounds for name in ("ge", "le")}
        default = _ABSENT.get(field.name, ... if field.default is msgspec.NODEFAULT else field.default)
        about = Field(default, description=meanings.get(field.name), **limits)
        fields[field.name] = (kind, about)
    return fields


def _meanings() -> dict[str, str]:
    """Field → the text below it, as pydantic reads it for every other document; none where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(ModelArchitecture))
    except OSError:
        return {}
    body = ast.parse(source).body[0]
    statements = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(statements)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


if TYPE_CHECKING:
    Architecture = DescribedModel
else:
    Architecture = create_model(
        "Architecture", __base__=DescribedModel, __doc__=DescribedModel.__doc__, __module__=__name__, **_fields()
    )
