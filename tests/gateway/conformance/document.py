"""An OpenAPI document of what a gateway serves of OpenAI's API, made of the SDK's own types.

OpenAI's published document of today is in no package registry; the SDK's types are generated from it. An older one is,
and `published.py` has it.
"""

from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams
from pydantic import TypeAdapter

POSTS = {
    "/v1/chat/completions": (ChatParams, ChatCompletion, True),
    "/v1/completions": (CompletionParams, Completion, True),
    "/v1/embeddings": (EmbeddingCreateParams, CreateEmbeddingResponse, False),
    "/v1/responses": (ResponseParams, Response, True),
}
"""Path → what is asked, what is answered, and whether it may stream."""
NAME = {"enum": ["m", "org/name", "org/other"]}
"""Of a model; the last one is not there."""
TEXT = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message", "param", "code"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "param": TEXT, "code": TEXT},
        }
    },
}
EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
REFUSALS = ("400", "401", "403", "404", "405", "411", "413", "414", "422", "429", "431")


def json_content(schema):
    return {"application/json": {"schema": schema}}


def answers(schema, *, streams=False):
    content = json_content(schema) | ({"text/event-stream": {"schema": EVENT}} if streams else {})
    refusal = {"description": "refused", "content": json_content({"$ref": "#/components/schemas/Error"})}
    return {"200": {"description": "answered", "content": content}} | dict.fromkeys(REFUSALS, refusal)


def as_it_may_be_asked(schema, *, streams):
    """Of a model by its name; as a stream, or whole."""
    schema["properties"]["model"] = NAME
    if streams:
        schema["properties"]["stream"] = {"type": ["boolean", "null"]}
    required = {"model", "input"} if "input" in schema["properties"] else {"model"}
    schema["required"] = sorted({*schema.get("required", ()), *required})


def document():
    listed = [(path, "validation", TypeAdapter(asked)) for path, (asked, _, _) in POSTS.items()]
    listed += [(path, "serialization", TypeAdapter(answer)) for path, (_, answer, _) in POSTS.items()]
    listed += [("/v1/models", "serialization", TypeAdapter(Model))]
    roots, defined = TypeAdapter.json_schemas(listed, ref_template="#/components/schemas/{model}")
    schemas = defined["$defs"] | {"Error": ERROR}

    def resolved(path, mode):
        schema = roots[path, mode]
        return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    paths = {}
    for path, (_, _, streams) in POSTS.items():
        as_it_may_be_asked(resolved(path, "validation"), streams=streams)
        paths[path] = {
            "post": {
                "requestBody": {"required": True, "content": json_content(roots[path, "validation"])},
                "responses": answers(roots[path, "serialization"], streams=streams),
            }
        }
    model = roots["/v1/models", "serialization"]
    page = {"type": "object", "required": ["object", "data"], "properties": {"data": {"type": "array", "items": model}}}
    paths["/v1/models"] = {"get": {"responses": answers(page)}}
    by_name = {"name": "model", "in": "path", "required": True, "schema": NAME}
    paths["/v1/models/{model}"] = {"get": {"parameters": [by_name], "responses": answers(model)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI's API, as far as a gateway serves it", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }
