"""What commands print with ``--json``, held against the schemas that are published of it."""

import copy
import functools
import json

import jsonschema

from fabrictool.cli.answer_schemas import COMMANDS, answer_schema


def check_answer(arguments, stdout):
    """Of a command line with ``--json``: that each document, or each line of a stream, is what its schema says, and
    has nothing that it does not name.
    """
    words = [str(argument) for argument in arguments]
    command = next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), None)
    if "--json" not in words or command is None or not stdout.strip():
        return
    for document in documents(command, stdout):
        validator(command).validate(document)


def documents(command, stdout):
    if COMMANDS[command].stream:
        lines = [json.loads(line) for line in stdout.splitlines()]
        assert lines[0]["type"] in ("version", "problems"), "a stream begins with its version"
        return lines
    return [json.loads(stdout)]


@functools.cache
def validator(command):
    return jsonschema.Draft202012Validator(closed(answer_schema(command)))


def closed(schema):
    """Without the room that is left for later versions."""
    schema = copy.deepcopy(schema)
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return schema
