"""What a client can do wrong: each is told clearly, with the value, and the server lives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

import openai
import pytest
from e2e_server import CHAT, COMPLETIONS, Answer, Server, chat_body, fresh

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def lives(server: Server) -> Iterator[Server]:
    """The main server, which answers after the test as before it, and whose counters do not show the test."""
    before = server.stats()
    yield server
    after = server.stats()
    assert server.ask("/health").status == 200
    assert after["requests"]["failed"] == before["requests"]["failed"]
    assert after["tokens"]["computed_in_steps"] == before["tokens"]["computed_in_steps"]
    assert server.complete([1000, 1001], max_tokens=1).usage["completion_tokens"] == 1


@pytest.mark.parametrize(("body", "param", "said"), [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "Hi"}, "messages", '"Hi"'),
    ({}, "messages", "required"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role", '"wizard"'),
    ({"messages": [USER, {"content": "Hi"}]}, "messages[1].role", "required"),
    ({"messages": [USER], "max_tokens": -5}, "max_tokens", "-5"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens", "0"),
    ({"messages": [USER], "max_tokens": "many"}, "max_tokens", '"many"'),
    ({"messages": [USER], "temperature": -1}, "temperature", "-1"),
    ({"messages": [USER], "top_p": 1.5}, "top_p", "1.5"),
    ({"messages": [USER], "n": 1000}, "n", "1000"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "image_url"),
])
def test_a_bad_chat_is_400_with_the_field_and_its_value(
        lives: Server, body: dict[str, Any], param: str, said: str) -> None:
    answer = lives.ask(CHAT, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert (answer.error["param"] or "").startswith(param)
    assert said in answer.error["message"]


@pytest.mark.parametrize(("body", "said"), [
    ({"prompt": []}, ""), ({"prompt": [1, 2, 10**7]}, "10000000"), ({"prompt": [-1]}, "-1"),
    ({"prompt": [1000], "max_tokens": -1}, "-1"), ({"prompt": {"a": 1}}, ""),
])
def test_a_bad_completion_is_400_with_its_value(lives: Server, body: dict[str, Any], said: str) -> None:
    answer = lives.ask(COMPLETIONS, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert said in answer.error["message"]


@pytest.mark.parametrize("raw", [b'{"messages": [', b"", b"\xff\xfe", b'{"messages": [{"role": "user"}]} more',
                                 b"[1, 2]", b"null", b"[" * 100_000])
def test_what_is_no_json_object_is_400(lives: Server, raw: bytes) -> None:
    answer = lives.ask(CHAT, raw)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_names_both_numbers(lives: Server, stream: bool) -> None:
    """PITFALLS 57, in OpenAI's shape; streamed too, it is a status and no event."""
    context = lives.ask("/v1/models").body["data"][0]["max_model_len"]
    answer = lives.ask(COMPLETIONS, {"prompt": [1000] * (context + 1), "stream": stream})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["type"] == "invalid_request_error"
    assert str(context) in answer.error["message"]
    assert str(context + 1) in answer.error["message"]
    long = lives.chat("word " * context, max_tokens=5, stream=stream)
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert f"{context} tokens" in long.error["message"]


def test_openai_s_client_raises_its_own_errors(lives: Server) -> None:
    with lives.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="smollm2", messages=[], max_tokens=1)
        assert caught.value.param == "messages"
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            client.chat.completions.create(model="gpt-9", messages=[USER], max_tokens=1)  # type: ignore[list-item]


def test_prompt_and_max_tokens_together_over_the_context_name_all_numbers(lives: Server) -> None:
    context = lives.ask("/v1/models").body["data"][0]["max_model_len"]
    answer = lives.complete([1000] * 10, max_tokens=context)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert all(str(n) in answer.error["message"] for n in (context, 10, context + 10))


def test_a_body_of_50_mb_is_413_with_both_numbers(lives: Server) -> None:
    body = json.dumps(chat_body("x" * 50_000_000)).encode()
    connection = lives.connect()
    try:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        with contextlib.suppress(ConnectionError):  # it may have answered, and closed, before it has all
            connection.send(body)
        try:
            response = connection.getresponse()
        except (ConnectionError, HTTPException):
            pytest.fail("the server closed the connection without an answer")
        answer = Answer(response.status, {}, json.loads(response.read()))
    finally:
        connection.close()
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert str(len(body)) in answer.error["message"]
    assert str(32 * 2**20) in answer.error["message"]


def test_unknown_models_paths_and_methods(lives: Server) -> None:
    assert lives.chat("Hi", model="gpt-9").status == 404
    assert "gpt-9" in lives.chat("Hi", model="gpt-9").error["message"]
    assert lives.ask("/v1/nothing").status == 404
    assert lives.ask(CHAT, method="GET").status == 405


def test_unknown_fields_are_ignored(server: Server) -> None:
    assert server.chat(fresh("Hi"), max_tokens=1, user="me", metadata={"a": "b"}, store=True).status == 200


# -- a small pool, and a template that misbehaves ------------------------------------------------------------


def still_answers(small: Server) -> None:
    assert small.ask("/health").status == 200
    assert small.chat("Hi", max_tokens=2).usage["prompt_tokens"] > 0
    assert small.available() == small.slots()


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_pool_names_both_numbers_and_the_option(small: Server, stream: bool) -> None:
    pool = small.slots() * 16
    answer = small.ask(COMPLETIONS, {"prompt": [1000] * (pool + 1), "max_tokens": 4, "stream": stream})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert str(pool) in answer.error["message"]
    assert str(pool + 1) in answer.error["message"]
    assert "--hbm" in answer.error["message"]
    still_answers(small)


def test_an_answer_that_reaches_the_end_of_the_pool_ends_with_length(small: Server) -> None:
    pool = small.slots() * 16
    answer = small.complete([1000] * (pool - 12), max_tokens=400, ignore_eos=True)
    assert answer.body["choices"][0]["finish_reason"] == "length"
    assert 10 <= answer.usage["completion_tokens"] <= 13
    still_answers(small)


def test_a_template_that_raises_is_422_with_its_words(small: Server) -> None:
    answer = small.chat("raise")
    assert answer.status == 422
    assert "this template wants no raise" in answer.error["message"]
    still_answers(small)


def test_a_template_that_loops_is_422_and_others_are_answered_meanwhile(small: Server) -> None:
    looping, plain = small.together([lambda: small.chat("loop"), lambda: small.chat("Hi", max_tokens=2)])
    assert looping.status == 422
    assert "template" in looping.error["message"]
    assert plain.status == 200
    still_answers(small)
