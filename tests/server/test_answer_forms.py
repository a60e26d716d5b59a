"""Answers under a form, over HTTP: every way to ask for one, refused forms, and common clients."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pytest
from form_cases import schemas
from pydantic import BaseModel

from cpmrt import MaskError
from cpmrt.grammar import grammars
from cpmrt.grammar.matcher import AnswerMatcher

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
GBNF = 'root ::= "<" [a-c]+ ">" | "none"'
SAMPLED = {"temperature": 1, "seed": 3, "max_tokens": 90}


def answer_of(server, **fields):
    answer = server.client.post("/v1/completions", json={"prompt": "x = ", **SAMPLED, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"]


OF_JSON = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}},
    {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}},
    {"json_schema": SCHEMA}, {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
]  # fmt: skip
OF_OTHERS = [
    ({"guided_regex": "[a-f]{3}"}, "[a-f]{3}"), ({"structured_outputs": {"regex": "[xy]z"}}, "[xy]z"),
    ({"regex": "a|b"}, "a|b"), ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"), ({"grammar": GBNF}, "<[abc]+>|none"),
    ({"guided_grammar": 'start: "q" /[0-9]{2}/'}, r"q\d{2}"), ({"ebnf": GBNF}, "<[abc]+>|none"),
    ({"structured_outputs": {"grammar": GBNF}}, "<[abc]+>|none"),
]  # fmt: skip


@pytest.mark.parametrize("fields", OF_JSON, ids=lambda fields: next(iter(fields)))
def test_answers_obey_their_schemas(demo, fields):
    jsonschema.validate(json.loads(answer_of(demo, **fields)), SCHEMA)


@pytest.mark.parametrize(("fields", "regex"), OF_OTHERS, ids=json.dumps)
def test_answers_obey_expressions_choices_and_grammars(demo, fields, regex):
    assert re.fullmatch(regex, answer_of(demo, **fields))


def test_any_object(demo):
    for fields in (
        {"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object", "schema": {}}},
        {"structured_outputs": {"json_object": True}},
    ):  # fmt: skip
        answer = demo.client.post("/v1/completions", json={"prompt": "{", **SAMPLED, **fields}).json()["choices"][0]
        assert answer["text"].startswith("{")
        assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["text"]), dict)


def test_a_chat_streams_its_form(demo):
    whole = demo.chat("say", guided_json=SCHEMA, **SAMPLED).json()["choices"][0]["message"]["content"]
    parts = []
    fields = {"messages": [{"role": "user", "content": "say"}], "guided_json": SCHEMA, "stream": True, **SAMPLED}
    with demo.client.stream("POST", "/v1/chat/completions", json=fields) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
    assert "".join(parts) == whole
    jsonschema.validate(json.loads(whole), SCHEMA)


def test_several_choices_and_logprobs(demo):
    fields = {"prompt": "x", "n": 3, "logprobs": 2, "guided_regex": "[ab]{6}", **SAMPLED}
    choices = demo.client.post("/v1/completions", json=fields).json()["choices"]
    assert all(re.fullmatch("[ab]{6}", choice["text"]) for choice in choices)
    assert all(len(choice["logprobs"]["tokens"]) for choice in choices)


UNSUPPORTED = {"schema": {"type": "array", "uniqueItems": True}}
REFUSED = [
    ({"guided_json": {"type": "wrong"}}, "guided_json"), ({"guided_regex": "("}, "guided_regex"),
    ({"guided_json": 5}, "guided_json"), ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"regex": "("}, "regex"), ({"ebnf": "root ::= ("}, "ebnf"), ({"json_schema": {"type": 5}}, "json_schema"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs.json"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_regex": ""}, "guided_regex"), ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", **UNSUPPORTED}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": UNSUPPORTED}}, "response_format.json_schema.schema"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"), ({"guided_json": '{"$ref": "#"}'}, "guided_json"),
    ({"guided_json": "no json"}, "guided_json"), ({"guided_regex": "a" * 300_000}, "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_form_that_cannot_be_had_is_refused(demo, fields, param):
    answer = demo.client.post("/v1/completions", json={"prompt": "x", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and "\n" not in error["message"], error
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_becomes_too_complex_is_the_requests_fault(demo, stream):
    """A form found too complex only in the middle of the answer is the request's fault, and the next request is
    answered."""
    regex = "a" + "(" * 50 + "a" + "{1,50})" * 50
    answer = demo.client.post("/v1/completions", json={"prompt": "x", "guided_regex": regex, "stream": stream})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    error = json.loads(events[-1] if stream and answer.status_code == 200 else answer.text)["error"]
    assert (error["code"], error["type"]) == ("form_failed", "invalid_request_error") and "\n" not in error["message"]
    assert stream or answer.status_code == 400
    assert re.fullmatch("[ab]{3}", answer_of(demo, guided_regex="[ab]{3}"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "ask", "kind"), [
    ("/v1/completions", {"prompt": "x"}, "server_error"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "server_error"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "api_error"),
])  # fmt: skip
def test_masks_that_come_too_late_are_the_servers_fault(demo, monkeypatch, path, ask, kind, stream):
    """Late masks are reported as the server's fault, also in the middle of a stream, whose status is 200 by then."""
    num_asked, allowed = [], AnswerMatcher.allowed

    def late(matcher):
        num_asked.append(matcher)
        if len(num_asked) == 4:
            raise MaskError.late()
        return allowed(matcher)

    monkeypatch.setattr(AnswerMatcher, "allowed", late)
    answer = demo.client.post(path, json={**ask, "guided_regex": "[ab]{9}[0-9]+", "stream": stream, **SAMPLED})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.status_code == (200 if stream else 500) and bool(events) == stream
    error = json.loads(events[-1] if stream else answer.text)["error"]
    assert error["type"] == kind and "not there in time" in error["message"]
    assert error.get("code", "mask_failed") == "mask_failed"
    monkeypatch.undo()
    assert re.fullmatch("[ab]{3}", answer_of(demo, guided_regex="[ab]{3}"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_form_that_waits_for_others_in_vain_may_be_sent_again(demo, monkeypatch, path):
    """A form whose turn to be compiled does not come is answered with a status that clients retry."""
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.05)
    monkeypatch.setattr(grammars.BoundedSemaphore, "acquire", lambda self, blocking=True, timeout=None: False)
    ask = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = demo.client.post(path, json={**ask, "guided_regex": "never compiled", **SAMPLED})
    error = answer.json()["error"]
    assert answer.status_code == 429 and answer.headers["Retry-After"] == "5" and error["type"] == "rate_limit_error"
    assert "other grammars are being compiled" in error["message"] and error.get("code", "forms_busy") == "forms_busy"


@pytest.mark.all
def test_slow_forms_hold_nobody_up(demo):
    """While a schema that takes long to compile is refused with a 400, other requests are answered."""
    from concurrent.futures import ThreadPoolExecutor
    from time import perf_counter

    slow = {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopq"]}
    demo.chat(max_tokens=2)
    with ThreadPoolExecutor(1) as pool:
        refused, begun, others = pool.submit(demo.chat, guided_json=slow), perf_counter(), 0
        while not refused.done():
            assert demo.chat(max_tokens=2).status_code == 200
            others += 1
        assert refused.result().status_code == 400
    assert others > 2 or perf_counter() - begun < 0.5


def test_the_official_client_parses_answers(demo):
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="x", max_retries=0)
    ask = [{"role": "user", "content": "Where to?"}]
    found = client.chat.completions.create(
        model="demo", messages=ask, temperature=1, seed=0, max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "Trip", "schema": SCHEMA}},
    )  # fmt: skip
    jsonschema.validate(json.loads(found.choices[0].message.content), SCHEMA)

    class Answer(BaseModel):
        is_raining: bool
        days: int

    parsed = client.beta.chat.completions.parse(
        model="demo", messages=ask, temperature=0, max_tokens=200, response_format=Answer
    )
    if parsed.choices[0].finish_reason == "stop":
        assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_instructor_reads_answers(demo):
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{demo.url}/v1", api_key="x", max_retries=0), mode=instructor.Mode.JSON_SCHEMA
    )

    class Weather(BaseModel):
        is_raining: bool
        wind: bool

    found = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "?"}], response_model=Weather, max_tokens=100, max_retries=1
    )
    assert isinstance(found, Weather)


@pytest.mark.all
def test_many_schemas_over_http(demo):
    for number, schema in enumerate(schemas(8, seed=4)):
        choice = demo.client.post(
            "/v1/completions", json={"prompt": "x", "guided_json": schema, **SAMPLED, "seed": number}
        ).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema, jsonschema.Draft202012Validator)
