"""Requests made from our own description: whatever comes, the answer has the right shape (about 40 s)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Running = Any  # the one in conftest.py
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/apply_template",
)
# nothing is answered: they look at tokens, or into a real cache
LOOKS = ("/tokenize", "/detokenize", "/v1/cache/explain", "/v1/cache/pin", "/v1/cache/purge")


@pytest.mark.parametrize("num_requests", [500, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_the_description(fuzzed: Any, path: str, num_requests: int, assert_shape: Any) -> None:
    assert {400, 404} <= send_bodies(fuzzed.url, path, num_requests // len(PATHS) + 1, assert_shape)
    # whether one of the drawn bodies is a good one, chance decides; after all of them a plain one is answered
    turn = [{"role": "user", "content": "Hi"}]
    plain = {"model": "nonsense", "max_tokens": 2, "messages": turn, "prompt": "Hi", "input": "Hi"}
    names = {"/v1/completions": ("prompt",), "/v1/responses": ("input",)}.get(path, ("messages",))
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        names = (*names, "max_tokens")
    body = {name: plain[name] for name in ("model", *names)}
    assert httpx.post(fuzzed.url + path, json=body, timeout=30).status_code == 200


@pytest.mark.parametrize("num_requests", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", LOOKS)
def test_bodies_of_routes_that_look(server: Any, path: str, num_requests: int, assert_shape: Any) -> None:
    assert 200 in send_bodies(server.url, path, num_requests // len(LOOKS), assert_shape)


def send_bodies(url: str, path: str, number: int, assert_shape: Any) -> set[int]:
    """So many bodies made from the description; the statuses they got."""
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    statuses: set[int] = set()
    client = httpx.Client(base_url=url, timeout=30)

    @given(data=st.data())
    @settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(data: st.DataObject) -> None:
        case = data.draw(schema[path]["POST"].as_strategy())
        body = case.body
        if not isinstance(body, dict):
            return
        # often a name that exists, and not every field of a kind of its own, so that more than one check is reached
        if data.draw(st.booleans()):
            body["model"] = "nonsense"
            body["max_tokens"] = 2
            for name in ("tools", "tool_choice", "system", "thinking", "output_config", "response_format"):
                if name in body and data.draw(st.integers(0, 3)):
                    del body[name]
        response = client.post(path, json=body)
        statuses.add(response.status_code)
        assert_shape(path, response)

    ask()
    client.close()
    return statuses


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), field=st.integers(0, 30), value=_JSON)
def test_any_value_in_any_field(fuzzed: Any, assert_shape: Any, path: str, field: int, value: Any) -> None:
    described = httpx.get(f"{fuzzed.url}/openapi.json").json()
    reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    names = sorted(described["components"]["schemas"][reference.rpartition("/")[2]]["properties"])
    turn = [{"role": "user", "content": "Hi"}]
    body: dict[str, Any] = {"model": "nonsense", "messages": turn, "input": "Hi", "prompt": "Hi", "max_tokens": 2}
    body[names[field % len(names)]] = value
    assert_shape(path, httpx.post(fuzzed.url + path, json=body, timeout=30))
