"""The cache as a client sees it: usage, headers, salts, explain, stats, purge, pin (about 15 s)."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from cedar.errors import CapacityError

Running = Any  # the one in conftest.py
CHAT = "/v1/chat/completions"


def ask(server: Running, text: str, **more: Any) -> httpx.Response:
    body = {"model": "nonsense", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    response = httpx.post(server.url + CHAT, json=body | more, timeout=60)
    assert response.status_code == 200, response.text
    return response


def test_a_second_turn_is_told_in_every_shape(server: Running) -> None:
    text = "The fox of the usage test lives near the river. " * 9
    cold, warm = ask(server, text), ask(server, text)
    usage = warm.json()["usage"]
    hit = usage["prompt_cache_hit_tokens"]
    assert cold.json()["usage"]["prompt_cache_hit_tokens"] == 0 and hit > 0
    assert hit + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == hit
    assert warm.headers["x-cache-hit"].startswith(f"{hit}/{usage['prompt_tokens']};tier=memory;resume=g")
    assert cold.headers["x-cache-hit"].endswith(";tier=none;resume=cold")
    assert warm.json()["choices"][0]["message"] == cold.json()["choices"][0]["message"]
    message = anthropic.Anthropic(base_url=server.url, api_key="none").messages.create(
        model="nonsense", max_tokens=2, messages=[{"role": "user", "content": text}]
    )
    assert message.usage.cache_read_input_tokens == hit
    assert message.usage.input_tokens == usage["prompt_tokens"] - hit
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.responses.create(model="nonsense", input=text, max_output_tokens=2)
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == hit


def test_salts_and_replay_off_share_nothing(server: Running) -> None:
    text = "The fox of the salt test lives near the river. " * 9
    ask(server, text)
    assert ask(server, text, cache_salt="mine").json()["usage"]["prompt_cache_hit_tokens"] == 0
    assert ask(server, text, cache_salt="mine").json()["usage"]["prompt_cache_hit_tokens"] > 0
    assert ask(server, text, replay="off").json()["usage"]["prompt_cache_hit_tokens"] == 0


def test_explain_stats_and_purge(server: Running) -> None:
    text = "The fox of the last test lives near the river. " * 9
    ask(server, text)
    body = {"model": "nonsense", "messages": [{"role": "user", "content": text[:300] + "But not here."}]}
    told = httpx.post(f"{server.url}/v1/cache/explain", json=body).json()
    assert 0 < told["held_tokens"] < told["prompt_tokens"]
    stats = httpx.get(f"{server.url}/v1/cache/stats").json()
    assert stats["tree_pages"] > 0 and stats["free_pages"] < stats["pages"]
    assert httpx.post(f"{server.url}/v1/cache/purge", json={}).json()["pages"] > 0
    assert httpx.post(f"{server.url}/v1/cache/explain", json=body).json()["held_tokens"] == 0
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'cached_tokens_total{tier="memory"}' in metrics and 'resume_total{grade="cold"}' in metrics


def test_a_pinned_prompt_stays(server: Running) -> None:
    text = "The fox of the pin test lives near the river, and it stays there. " * 9
    ask(server, text)
    body: dict[str, Any] = {"model": "nonsense", "messages": [{"role": "user", "content": text}]}

    def held() -> int:
        return int(httpx.post(f"{server.url}/v1/cache/explain", json=body).json()["held_tokens"])

    told = httpx.post(f"{server.url}/v1/cache/pin", json=body).json()
    assert told["pinned"] and 0 < told["tokens"] <= told["prompt_tokens"]
    assert httpx.get(f"{server.url}/v1/cache/stats").json()["pinned_pages"] > 0
    httpx.post(f"{server.url}/v1/cache/purge", json={})
    assert held() >= 128
    assert httpx.post(f"{server.url}/v1/cache/pin", json=body | {"pinned": False}).json()["pinned"] is False
    httpx.post(f"{server.url}/v1/cache/purge", json={})
    assert held() == 0
    for wrong in ({"pinned": "yes"}, {"messages": []}):
        response = httpx.post(f"{server.url}/v1/cache/pin", json=body | wrong)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_too_much_cannot_be_pinned(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(*_: Any) -> int:
        raise CapacityError("3 pages are pinned, 9 more would be more than half of 16: unpin others")

    monkeypatch.setattr(server.engine.cache, "pin", pin)
    body = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}]}
    response = httpx.post(f"{server.url}/v1/cache/pin", json=body)
    assert response.status_code == 400 and "unpin others" in response.json()["error"]["message"]
