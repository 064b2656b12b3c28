"""The schemas of what ``--json`` prints: one for each command that has it, and true. The commands' own tests hold what
they print against them, too (`tests.answers`).
"""

import json

import jsonschema
import pytest
import typer

from fabrictool.base.errors import Problem
from fabrictool.cli import answers, fabric_answers
from fabrictool.cli.answer_schemas import COMMANDS, answer_schema
from fabrictool.cli.commands import build
from fabrictool.cli.output import json_line, print_problems
from tests.answers import check_answer, closed, documents, validator


def with_json(command, name=""):
    """Names of the commands that have the option."""
    below = getattr(command, "commands", None)
    if below is None:
        return [name] if any("--json" in parameter.opts for parameter in command.params) else []
    return [typed for part, sub in below.items() for typed in with_json(sub, f"{name} {part}".strip())]


def test_every_command_with_json_has_a_schema_and_no_other():
    assert sorted(with_json(typer.main.get_command(build()))) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_is_a_schema_of_its_dialect_that_names_every_kind(command):
    schema = answer_schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    kinds = [option["$ref"].rpartition("/")[2] for option in schema["anyOf"]]
    assert kinds[-1] == "Problems"
    assert set(kinds) <= set(schema["$defs"])


def test_a_type_stands_for_one_form():
    """Two commands may print the same document; two documents never have the same type."""
    by_type = {}
    for printed in COMMANDS.values():
        for kind in printed.kinds:
            if issubclass(kind, answers.JsonDocument | answers.JsonLine):
                by_type.setdefault(kind.__struct_config__.tag, set()).add(kind)
    assert all(len(kinds) == 1 for kinds in by_type.values()), by_type
    assert not set(by_type) & set(fabric_answers.StepKind.__args__)


PRINTED = [
    ["validate", "--json"],
    ["show", "--json"],
    ["plan", "--assume-empty", "--json"],
    ["plan", "--assume-empty", "--json", "--explain", "--why-not", "m on a100-80gb"],
    ["plan", "--json"],
    ["plan", "--json", "--what-if", "rate.*=2"],
    ["plan", "--json", "--assume-empty", "--pareto", "cost,slo"],
    ["plan", "--json", "--assume-empty", "--horizon", "2h"],
    ["status", "--json"],
    ["events", "--json"],
    ["explain", "FT1203", "--json"],
    ["explain", "FT0000", "--json"],
    ["explain", "models.slo", "--json"],
    ["explain", "model/tiny", "--assume-empty", "--json"],
    ["doctor", "--json"],
    ["state", "show", "--json"],
    ["state", "history", "--json"],
    ["catalogue", "models", "--json"],
    ["catalogue", "devices", "--json"],
    ["simulate", "--requests", "50", "--json"],
    ["simulate", "--requests", "50", "--seeds", "2", "--json"],
    ["reconcile", "--dry-run", "--json"],
    ["destroy", "--yes", "--json"],
    ["apply", "no-such-plan.json", "--json"],
    ["mesh", "members", "--json"],
    ["trust", "show", "--json"],
]


@pytest.mark.parametrize("arguments", PRINTED, ids=" ".join)
def test_what_is_printed_is_what_the_schema_says(command, arguments):
    code, out, err = command(*arguments)
    assert out or code == 64, err
    check_answer(arguments, out)


def test_a_saved_plan_is_shown_as_its_schema_says(command):
    assert command("plan", "--assume-empty", "-o", "plan.json")[0] == 0
    code, out, _ = command("show", "plan.json", "--json")
    assert (code, json.loads(out)["type"]) == (0, "saved-plan")
    check_answer(["show", "--json"], out)


def test_a_key_that_no_schema_names_is_noticed(command):
    out = command("explain", "FT1203", "--json")[1]
    (document,) = documents("explain", out)
    with pytest.raises(jsonschema.ValidationError):
        validator("explain").validate(document | {"more": 1})
    jsonschema.validate(document | {"more": 1}, answer_schema("explain"))  # as a later minor version may have it


@pytest.mark.parametrize(("version", "good"), [("1.0", True), ("1.7", True), ("2.0", False), ("1", False)])
def test_a_minor_version_is_read_and_a_major_one_refused(version, good):
    document = {"type": "problems", "format_version": version, "problems": []}
    assert jsonschema.Draft202012Validator(answer_schema("validate")).is_valid(document) is good


def test_a_failure_in_the_middle_of_a_stream_is_its_last_line(capsys):
    json_line(answers.StreamVersion())
    json_line(fabric_answers.StepLine(type="started", action="create", address="replica/m/0", text=""))
    print_problems([Problem("FT4001", "two\nlines")], as_json=True)
    check_answer(["apply", "--json"], capsys.readouterr().out)


def test_fields_say_what_they_mean():
    schema = answer_schema("plan")["$defs"]["PlanAnswer"]
    assert schema["properties"]["read_set"]["description"].startswith("Fact → digest")
    assert "seconds" in answer_schema("plan")["$defs"]["TimedCertificate"]["required"]
    assert {"id", "actions", "format_version"} <= set(schema["required"])
    assert "moves" not in schema["required"]
    assert closed(answer_schema("plan"))["$defs"]["PlanAnswer"]["additionalProperties"] is False
