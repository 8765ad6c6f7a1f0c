"""The tokenizer's side of an answer, from ``engine.text``."""

from __future__ import annotations

from collections.abc import Callable

from cluster.gateway.answer import AnswerText
from cluster.gateway.job import Job
from engine.text.codec import TextCodec
from engine.text.detokenize import IncrementalDetokenizer
from engine.text.stop import StopChecker

PROMPT_TAIL = 8
"""Tokens of the prompt that the detokeniser sees."""


def answer_text_for(codec: TextCodec) -> Callable[[Job], AnswerText]:
    """Makes the text state of a job's answer. The prompt's last tokens decide whether the answer begins with a space."""
    return lambda job: AnswerText(IncrementalDetokenizer(codec, job.prompt_ids[-PROMPT_TAIL:]), StopChecker(job.stop))
