"""Random requests, blind ones and ones made from the service's own schema: any answer will do but 500, a hang, or
another client's harm."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from router.fake_controller import FakeController
from router.harness import MESSAGES, RunningRouter

from trunkline.router.api.models import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from trunkline.router.api.schema_types import SchemaRequest
from trunkline.router.api.session_types import SessionRequest

_PATHS: dict[str, Any] = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
    "/v1/sessions": (SessionRequest, {}),
    "/v1/schemas": (SchemaRequest, {"pml": "<schema name='x'>Hello.<module name='m'>You.</module></schema>"}),
}
_KEYS = [
    *["role", "content", "type", "text", "5", "include_usage", "x", "json_schema", "schema", "name", "regex"],
    *["choice", "json", "grammar", "json_object", "structural_tag", "function", "parameters", "tool_calls"],
    *["retention_ratio", "keep", "instructions", "sink_tokens", "modules", "path", "args", "items"],
]
_WORDS = [
    "json_object",
    "json_schema",
    "never",
    "required",
    "auto",
    "function",
    "assistant",
    "tool",
    "a|b",
    "retention_ratio",
    "<prompt schema='x'>a</prompt>",
    "<schema name='x'><module name='m'/></schema>",
    "x",
]
_leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1e308, 0.5, "", "a", "\x00", "\ufffe", "😀", "user"]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(_WORDS),
)
_value = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(_KEYS), inner),
    ),
    max_leaves=8,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_bodies(http: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(_PATHS)))
    model, base = _PATHS[path]
    names = st.sampled_from([*model.model_fields, "functions", "suffix", "json", "schema", "nonsense"])
    fields = base | data.draw(st.dictionaries(names, _value, max_size=3))
    content = json.dumps(fields, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
    response = http.post(path, content=content)
    assert response.status_code in (200, 201, 400, 404), (content, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
    elif fields.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        response.json()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_random_bytes(http: httpx.Client, content: bytes) -> None:
    assert http.post("/v1/completions", content=content).status_code == 400


def _whole_numbers(value: Any) -> Any:
    """1.0 is an integer to JSON schema, not here: without this few bodies would get any further."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return value


_Operation = Any
_WITH_BODIES = (*_PATHS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
_PLAIN: dict[str, Any] = {
    "messages": MESSAGES,
    "prompt": ["x", "y z"],
    "input": "x",
    "max_tokens": 5,
    "model": None,
    "tool_choice": None,
    "stream_options": None,
    "max_output_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 2,
    "n": 2,
    "best_of": None,
    "logit_bias": None,
    "stop_token_ids": None,
    "allowed_token_ids": None,
    "use_beam_search": None,
    "beam_width": None,
    "length_penalty": None,
    "early_stopping": None,
}
"""What most random bodies get wrong, so that nothing else of them is looked at."""


@pytest.fixture(scope="module")
def operations(cluster: tuple[RunningRouter, FakeController]) -> dict[str, _Operation]:
    """What the service says it takes, by path."""
    schema = schemathesis.openapi.from_dict(httpx.get(f"{cluster[0].url}/openapi.json", trust_env=False).json())
    found: list[_Operation] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    return {operation.path: operation for operation in found if operation.body}


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", _WITH_BODIES)
def test_bodies_from_the_schema(
    http: httpx.Client,
    operations: dict[str, _Operation],
    path: str,
    mode: schemathesis.GenerationMode,
) -> None:
    cases = operations[path].as_strategy(generation_mode=mode)

    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=cases, repaired=st.sets(st.sampled_from(sorted(_PLAIN)), min_size=len(_PLAIN) - 4))
    def send(case: Any, repaired: set[str]) -> None:
        body = _whole_numbers(case.body)
        if isinstance(body, dict) and mode == schemathesis.GenerationMode.POSITIVE:
            body |= {name: _PLAIN[name] for name in repaired if name in body}
        response = http.request(case.method, path, content=json.dumps(body, default=str))
        assert response.status_code in (200, 201, 400, 404), (body, response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    send()
    assert http.post("/v1/chat/completions", json={"messages": MESSAGES}).status_code == 200
