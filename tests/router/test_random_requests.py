"""Random requests, blind ones and ones made from the service's own schema: any answer will do but 500, a hang, or
another client's harm."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router.harness import MESSAGES

from trunkline.router.api.schema_types import SchemaRequest
from trunkline.router.api.session_types import SessionRequest
from trunkline.router.jobs.generation_parameters import DialogParameters
from trunkline.router.jobs.request_models import (
    CHAT,
    COMPLETIONS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

random = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
at_length = pytest.mark.parametrize(
    "times", [1, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
PATHS: dict[str, Any] = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
    "/v1/sessions": (SessionRequest, {}),
    "/v1/schemas": (SchemaRequest, {"pml": "<schema name='x'>Hello.<module name='m'>You.</module></schema>"}),
}
OTHERS = sorted({*CHAT.spellings, *COMPLETIONS.spellings, *(name for name, _ in CHAT.known)})
"""Other spellings, hints, and what is refused."""
KEYS = """
role content type text 5 include_usage x json_schema schema name regex choice json grammar json_object items args
structural_tag function parameters tool_calls retention_ratio keep instructions sink_tokens modules path required
id call_id arguments input output tool_use_id input_schema properties strict description format
""".split()
WORDS = [
    *"json_object json_schema never required auto function assistant user system message tool any a|b x".split(),
    *"input_text output_text function_call function_call_output tool_use tool_result object f c1 {} é\u2028".split(
        " "
    ),
    *("retention_ratio", "<prompt schema='x'>a</prompt>", "<schema name='x'><module name='m'/></schema>"),
]
leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1e308, 0.5, "", "a", "\x00", "\ufffe", "😀"]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
value = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=10,
)


def check(answer: httpx.Response, body: object) -> None:
    """An answer or an error in the API's form, and not one of the server's."""
    assert answer.status_code in (200, 201, 400, 404), (body, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "error" not in [line.partition(": ")[2] for line in answer.text.splitlines()]
    else:
        answer.json()


@at_length
def test_random_fields(http: httpx.Client, times: int) -> None:
    @settings(random, max_examples=60 * times)
    @given(data=st.data())
    def send(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(PATHS)))
        model, base = PATHS[path]
        names = st.one_of(
            st.sampled_from([*model.model_fields, "functions", "suffix", "json", "schema", "nonsense"]),
            st.sampled_from(OTHERS),
        )
        fields = base | data.draw(st.dictionaries(names, value, max_size=3))
        content = json.dumps(fields, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
        check(http.post(path, content=content), content)

    send()


@random
@given(content=st.binary(max_size=200))
def test_random_bytes(http: httpx.Client, content: bytes) -> None:
    assert http.post("/v1/completions", content=content).status_code == 400


SCHEMA = {"type": "object", "properties": {"x": {"maximum": 10**30}}}
ITEMS: Any = [
    {"role": "user", "content": "x"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 100000000000000000000000}'},
    {"type": "function_call_output", "call_id": "c1", "output": "y"},
]
COMPACTED: Any = [
    *ITEMS,
    {"type": "compaction", "encrypted_content": "tl1.eA==.eA=="},
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
    {"type": "compaction_trigger"},
]
COMPACTION: Any = {"type": "compaction", "compact_threshold": 1}
TURNS: Any = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 10**30}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "y"}]},
]
tool = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom"]), "name": st.sampled_from(["f", "g"])},
    optional=dict.fromkeys(("parameters", "input_schema", "description", "strict"), value),
)
tools = {"tools": st.one_of(value, st.lists(tool, max_size=3)), "tool_choice": value, "stream": st.booleans()}


def mixed(items: list[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(items), st.lists(st.one_of(st.sampled_from(items), value), max_size=5))


of_responses = st.fixed_dictionaries(
    {"input": st.one_of(mixed(ITEMS), mixed(COMPACTED))},
    optional={
        "context_management": st.one_of(value, mixed([COMPACTION])),
        "text": st.one_of(value, st.fixed_dictionaries({"format": value})),
        "instructions": value,
        "metadata": value,
        **tools,
    },
)
of_messages = st.fixed_dictionaries(
    {"max_tokens": st.just(5), "messages": mixed(TURNS)},
    optional=dict.fromkeys(("system", "stop_sequences", "output_config"), value) | tools,
)
shared_names = st.sampled_from(sorted(DialogParameters.model_fields))
TRANSLATED = {
    **dict.fromkeys(("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"), of_responses),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), of_messages),
}


@at_length
def test_random_items_and_tools(http: httpx.Client, times: int) -> None:
    @settings(random, max_examples=90 * times)
    @given(data=st.data())
    def send(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(TRANSLATED)))
        body = data.draw(TRANSLATED[path]) | data.draw(st.dictionaries(shared_names, value, max_size=1))
        check(http.post(path, content=json.dumps(body)), body)

    send()


def test_what_the_random_bodies_start_from_is_good(http: httpx.Client) -> None:
    made = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
    answer = http.post("/v1/responses", json={"input": ITEMS, "tools": [made]})
    assert answer.status_code == 200
    assert answer.json()["tools"] == [made]
    claude = {"name": "f", "input_schema": SCHEMA, "strict": True}
    body = {"max_tokens": 5, "messages": TURNS, "tools": [claude]}
    assert http.post("/v1/messages", json=body).status_code == 200
