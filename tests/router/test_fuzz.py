"""Random requests: any answer will do but 500, a hang, or another client's harm."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router.harness import MESSAGES

from trunkline.router.api.models import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_PATHS: dict[str, Any] = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
_leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1e308, 0.5, "", "a", "\x00", "\ufffe", "😀", "user"]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
)
_value = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5", "include_usage", "x"]), inner),
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
    names = st.sampled_from([*model.model_fields, "n", "tools", "response_format", "echo", "nonsense"])
    fields = base | data.draw(st.dictionaries(names, _value, max_size=3))
    content = json.dumps(fields, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
    response = http.post(path, content=content)
    assert response.status_code in (200, 400, 404), (content, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif fields.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        response.json()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_random_bytes(http: httpx.Client, content: bytes) -> None:
    assert http.post("/v1/completions", content=content).status_code == 400
