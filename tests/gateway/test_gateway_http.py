"""The front door with OpenAI's own client: what a user's first five minutes touch."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from gateway_fakes import MODEL, FakeCluster, reference_text, served, until

from scheduler.plan import Rejection

QUESTION = [{"role": "user", "content": "hi"}]
PROMPT = "<user>hi<assistant>"


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=10)


async def test_chat_answers_as_a_whole():
    async with served(FakeCluster(cached_tokens=8)) as gateway, client_of(gateway.url) as client:
        answer = await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=12, seed=0)
        assert answer.choices[0].message.content == reference_text(PROMPT, 12)
        assert answer.choices[0].finish_reason == "length"
        assert answer.object == "chat.completion"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(PROMPT), 12, len(PROMPT) + 12)
        assert usage.prompt_tokens_details.cached_tokens == 8
        # Both workers ended by themselves; the scheduler heard of it.
        assert gateway.cluster.aborted == []
        await until(lambda: not gateway.cluster.occupied and not gateway.cluster.running)


async def test_chat_streams_the_same_answer():
    async with served(FakeCluster(eos_after=9)) as gateway, client_of(gateway.url) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, seed=0, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == reference_text(PROMPT, 9)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10  # the end-of-sequence token was drawn too
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


async def test_stream_ends_with_done_and_without_usage_unless_asked():
    async with served() as gateway, httpx.AsyncClient() as client:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 2, "stream": True}
        reply = await client.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    assert "usage" not in reply.text


async def test_first_token_may_be_the_whole_answer():
    async with served() as gateway, client_of(gateway.url) as client:
        answer = await client.chat.completions.create(model="tiny", messages=QUESTION, max_completion_tokens=1, seed=0)
        assert answer.choices[0].message.content == reference_text(PROMPT, 1)
        assert [type(task).__name__ for task in gateway.cluster.tasks] == ["PrefillTask"]
        assert not gateway.cluster.tasks[0].hand_over


async def test_decode_is_let_go_when_the_first_token_ends_the_answer():
    async with served(FakeCluster(eos_after=0, step_s=0.001)) as gateway, client_of(gateway.url) as client:
        answer = await client.chat.completions.create(model="tiny", messages=QUESTION)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
        await until(lambda: [a[0] for a in gateway.cluster.aborted] == ["decode-0"])


async def test_choices_are_independent_draws():
    async with served() as gateway, client_of(gateway.url) as client:
        answer = await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=6, n=3, seed=5)
        assert [c.message.content for c in answer.choices] == [reference_text(PROMPT, 6, 5 + i) for i in range(3)]
        assert answer.usage.prompt_tokens == len(PROMPT)
        assert answer.usage.completion_tokens == 18
        stream = await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=6, n=2, seed=-1, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == [reference_text(PROMPT, 6, 2**64 - 1), reference_text(PROMPT, 6, 0)]


async def test_completions_take_text_lists_and_tokens():
    async with served() as gateway, client_of(gateway.url) as client:
        for prompt, expected in [
            ("abc", ["abc"]),
            (["abc", "wxyz"], ["abc", "wxyz"]),
            (list(b"abc"), ["abc"]),
            ([list(b"abc"), list(b"wxyz")], ["abc", "wxyz"]),
        ]:
            answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=5, seed=0)
            assert [c.text for c in answer.choices] == [reference_text(text, 5) for text in expected]
            assert answer.usage.prompt_tokens == sum(len(text) for text in expected)
        stream = await client.completions.create(model="tiny", prompt="abc", max_tokens=5, seed=0, stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == reference_text("abc", 5)


async def test_stop_strings_end_the_answer_before_them():
    whole = reference_text("abc", 30)
    stop = whole[10:13]
    cut = whole[: whole.index(stop)]
    async with served(FakeCluster(step_s=0.001)) as gateway, client_of(gateway.url) as client:
        answer = await client.completions.create(
            model="tiny", prompt="abc", max_tokens=400, seed=0, stop=[stop, "nothing"], logprobs=1
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
        assert "".join(answer.choices[0].logprobs.tokens) == cut
        # Long before its 400 tokens, both workers were told.
        await until(lambda: sorted(a[0] for a in gateway.cluster.aborted) == ["decode-0", "prefill-0"])
        await until(lambda: not gateway.cluster.running)


async def test_half_characters_wait_for_their_other_half():
    text = "añ→😀z"
    cluster = FakeCluster(answers=lambda tokens, seed: text.encode()[len(tokens) - 3])
    async with served(cluster) as gateway, client_of(gateway.url) as client:
        stream = await client.completions.create(
            model="tiny", prompt="abc", max_tokens=len(text.encode()), stream=True, logprobs=0
        )
        parts = [(c.choices[0].text, c.choices[0].logprobs) async for c in stream]
    assert "".join(t for t, _ in parts) == text
    assert all("\ufffd" not in t for t, _ in parts)
    offsets = [o for _, logprobs in parts if logprobs for o in logprobs.text_offset]
    assert offsets == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]


async def test_logprobs_of_chat():
    async with served() as gateway, client_of(gateway.url) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=4, seed=0, logprobs=True, top_logprobs=2
        )
        content = answer.choices[0].logprobs.content
        assert "".join(t.token for t in content) == answer.choices[0].message.content
        assert all(t.logprob == -0.5 and bytes(t.bytes).decode() == t.token and len(t.top_logprobs) == 2 for t in content)


async def test_models_health_live_metrics():
    async with served() as gateway, client_of(gateway.url) as client, httpx.AsyncClient(base_url=gateway.url) as raw:
        assert [m.id async for m in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "moonpool"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        assert (await raw.get("/health")).status_code == 200
        assert (await raw.get("/live")).json() == {"status": "live"}
        await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
        text = (await raw.get("/metrics")).text
        assert "moonpool_gateway_ttft_seconds_count 1.0" in text
        assert "moonpool_gateway_tbt_seconds_count 3.0" in text
        assert "moonpool_gateway_completion_tokens_total 4.0" in text
        assert 'moonpool_gateway_requests_total{outcome="ok",route="/v1/chat/completions"} 1.0' in text
        gateway.service.draining = True
        assert (await raw.get("/health")).status_code == 503


async def test_request_id_is_the_clients_only_where_it_is_harmless():
    async with served() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/live", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        for bad in ("a b", "x" * 129, "tcp://evil/"):
            given = (await client.get("/nothing", headers={"x-request-id": bad})).headers["x-request-id"]
            assert given.startswith("req_")


async def test_keys():
    async with served(api_keys=("one", "two")) as gateway:
        async with client_of(gateway.url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        roots = []
        for key in ("one", "two", "one"):
            async with client_of(gateway.url, key) as client:
                await client.completions.create(model="tiny", prompt="abcd", max_tokens=2)
            roots.append(gateway.cluster.routed[-1].keys)
        assert roots[0] == roots[2] != roots[1]  # another key, another cache
        async with httpx.AsyncClient(base_url=gateway.url) as raw:
            assert (await raw.get("/metrics")).status_code == 401
            assert (await raw.get("/no/such/path")).status_code == 401
            assert (await raw.get("/health")).status_code == 200


async def test_cache_salt_narrows_the_cache():
    async with served() as gateway, client_of(gateway.url) as client:
        for salt in ("a", "b", "a"):
            await client.completions.create(model="tiny", prompt="abcd", max_tokens=2, extra_body={"cache_salt": salt})
        first, second, third = [request.keys for request in gateway.cluster.routed]
        assert first == third != second


async def test_bitwise_reuse_travels_with_the_tasks():
    model = MODEL.model_copy(update={"bitwise": True})
    async with served(model=model) as gateway, client_of(gateway.url) as client:
        await client.completions.create(model="tiny", prompt="abcd", max_tokens=2)
        prefill, decode = sorted(gateway.cluster.tasks, key=lambda t: type(t).__name__, reverse=True)
        assert prefill.reusable_only_at_chunks
        assert not decode.write_back


async def test_full_cluster_is_429_and_empty_cluster_503():
    overloaded = Rejection("", 0, "overloaded", 7.2)
    nobody = Rejection("", 0, "no_worker", 2.0)
    async with served(FakeCluster(rejections=[overloaded, nobody])) as gateway, client_of(gateway.url) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="tiny", messages=QUESTION, stream=True)
        assert refused.value.response.headers["retry-after"] == "8"
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="tiny", messages=QUESTION)
        assert (refused.value.status_code, refused.value.code) == (503, "no_worker")
        assert gateway.cluster.tasks == []


async def test_requests_over_the_limit_are_429():
    async with served(FakeCluster(step_s=0.01), requests_max=2) as gateway, client_of(gateway.url) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=QUESTION, n=3)
        first = asyncio.create_task(client.chat.completions.create(model="tiny", messages=QUESTION, n=2, max_tokens=20))
        await until(lambda: gateway.service.slots.taken == 2)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=QUESTION)
        await first
        await until(lambda: gateway.service.slots.taken == 0)


async def test_cached_tokens_are_never_more_than_the_prompt():
    async with served(FakeCluster(cached_tokens=100)) as gateway, client_of(gateway.url) as client:
        answer = await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2)
        assert answer.usage.prompt_tokens_details.cached_tokens == len(PROMPT)


async def test_details_on_request():
    async with served(FakeCluster(cached_tokens=8)) as gateway, client_of(gateway.url) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=4, extra_headers={"x-moonpool-details": "1"}
        )
        (detail,) = answer.moonpool["choices"]
        assert detail["cached_tokens"] == {"device": 8, "dram": 0, "ssd": 0, "remote": 0}
        assert detail["prefill_s"] == 0.003
        assert detail["ttft_s"] > 0


async def test_the_service_that_is_asked_for_travels_to_the_scheduler():
    headers = {"x-request-class": "gold", "x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "80.5", "x-request-priority": "-3"}
    async with served() as gateway, client_of(gateway.url) as client:
        await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4, extra_headers=headers)
        await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
        asked, plain = gateway.cluster.routed
        assert (asked.request_class, asked.slo_ttft_s, asked.slo_tpot_s, asked.admitted) == ("gold", 1.5, 0.0805, False)
        assert (plain.request_class, plain.slo_ttft_s, plain.slo_tpot_s) == ("", None, None)
        assert (asked.priority, plain.priority) == (-3, 0)
        await until(lambda: len(gateway.cluster.truths) == 2)
        (_, ttft_s, tokens), _ = gateway.cluster.truths
        assert ttft_s > 0
        assert tokens == 4
        async with httpx.AsyncClient() as plain_http:
            metrics = (await plain_http.get(f"{gateway.url}/metrics")).text
    assert "moonpool_gateway_ttft_predicted_seconds_count 2.0" in metrics
    assert "moonpool_gateway_ttft_prediction_error_ratio_count 2.0" in metrics


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-slo-ttft-ms", "soon"), ("x-slo-ttft-ms", "0"), ("x-slo-ttft-ms", "-5"), ("x-slo-ttft-ms", "nan"),
        ("x-slo-tpot-ms", "1e3"), ("x-slo-tpot-ms", "99999999"), ("x-slo-tpot-ms", ""), ("x-request-class", "Big Name"),
        ("x-request-class", "a" * 65), ("x-request-priority", "high"), ("x-request-priority", "11"),
        ("x-request-priority", "-11"), ("x-request-priority", "1.5"), ("x-request-priority", ""), ("x-request-priority", "u=1"),
    ],
)  # fmt: skip
async def test_a_service_that_cannot_be_is_400_and_names_the_header(header: str, value: str):
    async with served() as gateway, httpx.AsyncClient() as client:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 2}
        reply = await client.post(f"{gateway.url}/v1/chat/completions", json=body, headers={header: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == header
        assert gateway.cluster.routed == []


async def test_a_decode_worker_that_is_too_slow_is_429_and_not_tried_elsewhere():
    from gateway_fakes import Fault

    async with served(FakeCluster(faults=[Fault("too_slow")])) as gateway, httpx.AsyncClient() as client:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 8}
        reply = await client.post(f"{gateway.url}/v1/chat/completions", json=body)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert len(gateway.cluster.routed) == 1
        assert gateway.cluster.reported == []
        await until(lambda: not gateway.cluster.occupied)
