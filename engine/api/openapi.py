"""GET /openapi.json, made from the pydantic models, and the table of endpoints that it and the skin share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from engine.api.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeReply,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    TokenizeReply,
)
from engine.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChat,
    TokenizePrompt,
)

_Model = type[BaseModel]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `chunk` is the shape of a stream's events; no `reply` means free JSON."""

    method: str
    path: str
    summary: str
    requests: tuple[_Model, ...] = ()
    reply: _Model | None = None
    chunk: _Model | None = None
    needs_key: bool = True


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", "Continue a chat.", (ChatRequest,), ChatCompletion, ChatChunk),
    Endpoint("POST", "/v1/completions", "Continue a text, or token ids.", (CompletionRequest,), Completion,
             Completion),
    Endpoint("GET", "/v1/models", "The served model, under each of its names.", (), ModelList),
    Endpoint("GET", "/v1/models/{model}", "One name of the served model.", (), ModelCard),
    Endpoint("POST", "/tokenize", "The token ids of a text, or of rendered messages.",
             (TokenizePrompt, TokenizeChat), TokenizeReply),
    Endpoint("POST", "/detokenize", "The text of token ids.", (DetokenizeRequest,), DetokenizeReply),
    Endpoint("GET", "/health", "200 when requests are served; 503 while loading or restarting.", (), Health,
             needs_key=False),
    Endpoint("GET", "/v1/cache/stats", "What the cache holds and did."),
    Endpoint("GET", "/openapi.json", "This description.", needs_key=False),
)


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    used: list[tuple[_Model, JsonSchemaMode]] = [(ErrorBody, "serialization")]
    for endpoint in ENDPOINTS:
        used += [(model, "validation") for model in endpoint.requests]
        used += [(m, "serialization") for m in (endpoint.reply, endpoint.chunk) if m is not None]
    refs, schemas = models_json_schema(
        list(dict.fromkeys(used)), ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Trunkline", "version": version},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {}),
                       "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, refs: Mapping[Any, Any]) -> dict[str, Any]:
    reply = refs[endpoint.reply, "serialization"] if endpoint.reply else {"type": "object"}
    content = {"application/json": {"schema": reply}}
    if endpoint.chunk:
        content["text/event-stream"] = {"schema": refs[endpoint.chunk, "serialization"]}
    error = {"application/json": {"schema": refs[ErrorBody, "serialization"]}}
    out: dict[str, Any] = {
        "summary": endpoint.summary,
        "security": [{}, {"key": []}] if endpoint.needs_key else [],
        "responses": {"200": {"description": "OK", "content": content},
                      "default": {"description": "An error, in OpenAI's shape", "content": error}},
    }
    if endpoint.requests:
        schemas = [refs[model, "validation"] for model in endpoint.requests]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{model}" in endpoint.path:
        out["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return out
