from __future__ import annotations

from typing import Any

import pytest
from api_harness import INFO, MAX_CONTEXT, FakeCore, ask, chat, make_text, run, send, serving
from openai import AsyncOpenAI

from engine.api import openapi
from engine.api.app import make_app
from engine.api.state import ServerState
from engine.config import ServeConfig
from engine.errors import EngineError


def test_models_lists_the_name_and_its_aliases() -> None:
    async def go() -> Any:
        config = ServeConfig(served_model_name="own", alias=("gpt-4o", "org/m", "own"))
        async with (serving(FakeCore(), config=config) as url,
                    AsyncOpenAI(base_url=url + "/v1", api_key="x") as c):
            found = await c.models.list()
            one = await send(url, "GET", "/v1/models/org/m")
            none = await send(url, "GET", "/v1/models/nope")
            return found, one, none
    found, one, none = run(go())
    assert [m.id for m in found.data] == ["own", "gpt-4o", "org/m"]
    assert (one.body["id"], one.body["root"], one.body["max_model_len"]) == ("org/m", "own", MAX_CONTEXT)
    assert (one.body["object"], one.body["owned_by"]) == ("model", "trunkline")
    assert (none.status, none.error["code"]) == (404, "model_not_found")


def test_tokenize_a_text_in_vllm_s_form() -> None:
    body = ask("/tokenize", {"model": "bytes", "prompt": "é"}).body
    assert (body["count"], body["max_model_len"], len(body["tokens"])) == (3, MAX_CONTEXT, 3)
    assert body["tokens"][0] == 258
    assert ask("/tokenize", {"prompt": "é", "add_special_tokens": False}).body["count"] == 2


def test_tokenize_messages_gives_what_a_chat_sends_to_the_core() -> None:
    core = FakeCore()
    ask("/v1/chat/completions", chat(), core)
    answer = ask("/tokenize", chat())
    assert b"".join(t.to_bytes(4, "little") for t in answer.body["tokens"]) == core.requests[0].ids
    shorter = ask("/tokenize", chat(add_generation_prompt=False)).body["count"]
    assert shorter == answer.body["count"] - len("assistant\n") - 1


def test_tokenize_takes_template_kwargs_and_tools() -> None:
    text = make_text("{{ mood }}{{ (tools or [])|length }}")
    tool = {"type": "function", "function": {"name": "f"}}
    body = ask("/tokenize", chat(chat_template_kwargs={"mood": "ab"}, tools=[tool]), text=text).body
    assert body["count"] == 3


def test_detokenize_is_the_inverse_and_writes_special_tokens_out() -> None:
    async def go() -> str:
        async with serving(FakeCore()) as url:
            tokens = (await send(url, "POST", "/tokenize", {"prompt": "a<|im_end|>é😀"})).body["tokens"]
            return str((await send(url, "POST", "/detokenize", {"tokens": tokens})).body["prompt"])
    assert run(go()) == "<s>a<|im_end|>é😀"


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [INFO.vocab_size]}, "tokens[0]"), ("/detokenize", {"tokens": "1"}, "tokens"),
])
def test_bad_tokens_are_refused(path: str, body: Any, param: str) -> None:
    answer = ask(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_tokenize_knows_no_other_model() -> None:
    assert ask("/tokenize", {"model": "other", "prompt": "x"}).status == 404
    assert ask("/detokenize", {"model": "other", "tokens": []}).status == 404
    assert ask("/detokenize", {"tokens": []}).body == {"prompt": ""}


def test_cache_stats_are_the_core_s() -> None:
    assert ask("/v1/cache/stats", None, method="GET").body == {"tiers": {"hbm": {"used": 3}}}


@pytest.mark.parametrize(("state", "status", "said"), [
    ("ready", 200, "ok"), ("loading", 503, "loading"), ("dead", 503, "restarting")])
def test_health_follows_the_core(state: str, status: int, said: str) -> None:
    core = FakeCore()
    core.state = state
    answer = ask("/health", None, core, method="GET")
    assert (answer.status, answer.body) == (status, {"status": said})


@pytest.mark.parametrize(("state", "code"), [("loading", "loading"), ("dead", "restarting")])
@pytest.mark.parametrize(("method", "path"), [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
    ("GET", "/v1/models"), ("GET", "/v1/cache/stats")])
def test_while_the_core_is_away_everything_else_is_503_with_retry_after(
        method: str, path: str, state: str, code: str) -> None:
    core = FakeCore()
    core.state = state
    answer = ask(path, chat(prompt="a"), core, method=method)
    assert (answer.status, answer.error["code"]) == (503, code)
    assert int(answer.headers["Retry-After"]) >= 1
    assert core.requests == []


def test_a_core_that_dies_fails_what_runs_and_serves_again_when_it_is_back() -> None:
    core = FakeCore("a", 0.05, EngineError("the core process died"))

    async def go() -> list[int]:
        async with serving(core) as url:
            statuses = [(await send(url, "POST", "/v1/chat/completions", chat())).status]
            core.state = "dead"
            statuses.append((await send(url, "POST", "/v1/chat/completions", chat())).status)
            core.state = "ready"
            statuses.append((await send(url, "GET", "/v1/cache/stats")).status)
            return statuses
    assert run(go()) == [500, 503, 200]


def test_openapi_describes_every_route_and_no_other() -> None:
    document = ask("/openapi.json", None, method="GET").body
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    routes = {(r.method, r.resource.canonical) for r in make_app(ServerState(ServeConfig())).router.routes()
              if r.resource is not None and r.method != "HEAD"}
    assert described == routes
    assert document["openapi"].startswith("3.1")


def test_openapi_is_made_from_the_models_and_its_references_resolve() -> None:
    document = openapi.describe("1")
    schemas = document["components"]["schemas"]
    operation = document["paths"]["/v1/chat/completions"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    chat_request = schemas["ChatRequest"]
    assert {"messages", "temperature", "stop", "chat_template_kwargs"} <= chat_request["properties"].keys()
    assert chat_request["required"] == ["messages"]
    assert "text/event-stream" in operation["responses"]["200"]["content"]

    def references(node: Any) -> Any:
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)
    found = set(references(document))
    assert found
    assert {r.rpartition("/")[2] for r in found} <= schemas.keys()
