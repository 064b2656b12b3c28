"""``explain``: an error code, a key of a file, or why a model stands where it stands."""

from __future__ import annotations

import difflib
import re
import time
from typing import TYPE_CHECKING

from fabrictool.base.errors import UsageError
from fabrictool.cli.answers import Decision, Explanation
from fabrictool.cli.output import json_data, paint
from fabrictool.cli.paging import page
from fabrictool.cli.plan_text import folded

if TYPE_CHECKING:
    from fabrictool.cli.answers import FieldExplanation, FieldRow
    from fabrictool.cli.source import Source

_CODE = re.compile(r"[Ff][Tt]\d+")
_QUESTION = re.compile(r"model/|.+(@|\s+on\s+).+")


def explain_thing(thing: str, source: Source, *, assume: bool, as_json: bool) -> None:
    """Raises UsageError FT9003 for what is none of the three, FT2015 for a question about nothing that is there."""
    from fabrictool.catalog.errors import error_codes
    from fabrictool.cli.fields import explain_field, paths

    codes = error_codes()
    if _QUESTION.fullmatch(thing) or thing.startswith("model/"):
        _tell_decision(thing.removeprefix("model/"), source, assume=assume, as_json=as_json)
        return
    if entry := codes.get(thing.upper()):
        if as_json:
            json_data(Explanation(code=thing.upper(), title=entry.title, text=entry.text, hint=entry.hint))
        else:
            page(f"{paint(thing.upper(), 'bold')}  {entry.title}\n\n{entry.text}\n\nWhat to do: {entry.hint}")
        return
    field = None if _CODE.fullmatch(thing) else explain_field(thing)
    if field is None:
        near = difflib.get_close_matches(thing.upper(), codes, 3) or difflib.get_close_matches(thing, list(paths()), 3)
        hint = f"nearest: {', '.join(near)}" if near else "a code, a key such as models.slo, or model/NAME"
        raise UsageError.of("FT9003", f"nothing is known of {thing!r}", hint=hint)
    if as_json:
        json_data(field)
    else:
        page("\n".join(_field_lines(field)))


def _field_lines(field: FieldExplanation) -> list[str]:
    lines = [f"{paint(field.path, 'bold')}{_in_brackets(field)}"]
    lines += folded(f"  {field.text}") if field.text else []
    for row in field.keys:
        lines += ["", *folded(f"  {paint(row.key, 'bold')}{_in_brackets(row)}", "      ")]
        lines += folded(f"      {row.text}", "      ") if row.text else []
    return lines


def _in_brackets(field: FieldExplanation | FieldRow) -> str:
    """What may stand there, and what stands there if nothing is written."""
    default = "required" if field.required else f"default {field.default}" if field.default else ""
    words = "; ".join(filter(None, (field.value, default)))
    return f"  ({words})" if words else ""


def _tell_decision(question: str, source: Source, *, assume: bool, as_json: bool) -> None:
    from fabrictool.cli.planning import WORK, evidence_of, search_progress
    from fabrictool.planner.plan import PlanOptions, decision

    options = PlanOptions(0, WORK / 100, progress=search_progress(source.inventory))
    evidence = evidence_of(source, None, assume=assume)
    sentences = decision(source.blueprint, source.inventory, evidence, options, question, now=time.time())
    if as_json:
        json_data(Decision(question=question, sentences=list(sentences)))
    else:
        page("\n".join(line for sentence in sentences for line in folded(f"· {sentence}")))
