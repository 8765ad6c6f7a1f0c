"""The gateway with the engine's own text code and a small byte-level tokenizer made here."""

from __future__ import annotations

import pytest
from gateway_fakes import FAST, MODEL, SINK, FakeCluster
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cluster.gateway.service import Call, GatewayService
from cluster.gateway.settings import GatewaySettings
from cluster.gateway.text import answer_text_for
from engine.serving.token_stream import decode
from engine.text.codec import TextCodec

ANSWER = "The café is 😀 open → until 10, and the tea is good."
QUESTION = [{"role": "user", "content": "is the café open?"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([ANSWER, "user: is the café open?"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE)
    return TextCodec(fast, (int(fast.eos_token_id),))


@pytest.mark.parametrize(("stop", "expected"), [(None, ANSWER), ("tea", ANSWER.split("tea")[0]), ("→", ANSWER.split("→")[0])])
async def test_chat_with_a_real_tokenizer(codec: TextCodec, stop: str | None, expected: str):
    ids = [*codec.encode(ANSWER), *codec.eos_token_ids]
    prompt_tokens = len(codec.apply_chat_template(QUESTION))
    cluster = FakeCluster(answers=lambda tokens, seed: ids[min(len(tokens) - prompt_tokens, len(ids) - 1)])
    service = GatewayService(
        settings=GatewaySettings(**FAST), model=MODEL, codec=codec, ports=cluster, sink=SINK, answer_text=answer_text_for(codec)
    )  # fmt: skip
    cluster.deliver = lambda frame: service.dispatcher.on_events(*decode(frame))
    body = {"model": "tiny", "messages": QUESTION, "logprobs": True}
    generation, _ = await service.chat(body | ({"stop": stop} if stop else {}), Call("", service.now(), False, lambda n: None))
    choice = (await generation.whole())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    assert codec.decode(cluster.tasks[0].token_ids) == "user: is the café open?\nassistant:"
    tokens = choice["logprobs"]["content"]
    assert all(t["bytes"] is None or bytes(t["bytes"]).decode() == t["token"] for t in tokens)
    await service.close()
