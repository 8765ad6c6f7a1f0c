"""The ``gateway:`` section of the configuration: every limit of the front door, in one place."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class GatewaySettings(BaseModel):
    """Limits come before work: a request over one of them costs no worker anything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[str, Field(description="Address that the HTTP server binds; loopback unless set.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port of the HTTP server; 0 takes any free one.")] = 8000
    api_keys: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(max_length=1024, repr=False, description="Keys accepted as 'Authorization: Bearer'; empty lets everyone in."),
    ] = ()
    admin_keys: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(
            max_length=1024,
            repr=False,
            description="Keys for `moonpool pool`. Empty: only this machine may use it, and only while api_keys is empty too.",
        ),
    ] = ()
    share_cache_between_keys: Annotated[
        bool, Field(description="Let requests under different API keys reuse each other's cached prefixes.")
    ] = False

    connections_max: Annotated[int, Field(ge=1, description="Open connections; more are answered 503.")] = 4096
    requests_max: Annotated[
        int, Field(ge=1, description="Answers in work at a time (a request with n=2 is two); more are answered 429.")
    ] = 256
    body_bytes_max: Annotated[int, Field(ge=1024, description="Longest request body in bytes; a longer one is answered 413.")] = (
        4 * 1024 * 1024
    )
    body_timeout_s: Annotated[float, Field(gt=0, description="Time in which a request body must have arrived.")] = 30.0
    json_depth_max: Annotated[int, Field(ge=8, le=200, description="Deepest nesting of a request body.")] = 32
    messages_max: Annotated[int, Field(ge=1, description="Messages in one chat request.")] = 4096
    prompts_max: Annotated[int, Field(ge=1, description="Prompts in one completions request.")] = 32
    n_max: Annotated[int, Field(ge=1, le=128, description="Choices per prompt (n).")] = 8
    stop_max: Annotated[int, Field(ge=1, le=64, description="Stop strings in one request.")] = 4
    stop_chars_max: Annotated[int, Field(ge=1, le=4096, description="Characters of one stop string.")] = 256
    default_max_tokens: Annotated[
        int, Field(ge=0, description="Answer length where the client names none; 0 gives the rest of the context.")
    ] = 0

    request_timeout_s: Annotated[float, Field(gt=0, description="Time a request may take in all.")] = 600.0
    call_timeout_s: Annotated[float, Field(gt=0, description="Time in which the scheduler or a worker must take a call.")] = 5.0
    stall_timeout_s: Annotated[
        float,
        Field(gt=0, description="Silence of an attempt after which it is planned again; before the first token the plan's own"
              " prediction is added several times over."),
    ] = 30.0  # fmt: skip
    gap_timeout_s: Annotated[float, Field(gt=0, description="Time in which a token frame that was overtaken must arrive.")] = 1.0
    attempts_max: Annotated[int, Field(ge=1, le=16, description="Attempts at one answer before the client gets an error.")] = 4
    retry_backoff_s: Annotated[
        float, Field(ge=0, description="Wait before the second retry of an answer; the third waits twice as long, and so on.")
    ] = 1.0
    preemptions_max: Annotated[
        int, Field(ge=0, le=1024, description="Times one answer may give way to others when a decode cache is full.")
    ] = 64
    scheduler_wait_s: Annotated[
        float, Field(gt=0, description="Time to wait for a scheduler that does not answer before a request fails.")
    ] = 10.0
    replan_wait_s: Annotated[
        float, Field(gt=0, description="Time an answer under way may wait for a free worker after its own was lost.")
    ] = 30.0
    client_stall_s: Annotated[
        float, Field(gt=0, description="Time for which a streaming client may take nothing before its request is dropped.")
    ] = 30.0
    drain_s: Annotated[float, Field(ge=0, description="Time that requests under way get to finish when the gateway stops.")] = 5.0

    tokenizer_threads: Annotated[int, Field(ge=1, le=64, description="Threads for the tokenisation of long prompts.")] = 2
    inline_chars_max: Annotated[
        int, Field(ge=0, description="Prompts up to this many characters are tokenised at once, without a thread.")
    ] = 4096
