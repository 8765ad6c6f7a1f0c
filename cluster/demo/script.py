"""What is asked in the demo. Greedy decoding throughout: the same question has the same answer each time."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

Conversation = list[dict[str, str]]

QUESTIONS: Final = (
    "Who was sitting between the March Hare and the Hatter?",
    "Where did the three sisters live, and what did they live on?",
    "What did the March Hare dip into his cup of tea?",
    "Who is the Dormouse, and what story does the Dormouse tell?",
)
CONTINUE: Final = "Continue the story."
ANSWER_TOKENS_MAX: Final = 48
CHAT_TOKENS_MAX: Final = 80
CONTINUE_TOKENS_MAX: Final = 80

POEM: Final = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance, or nature's changing course, untrimm'd."""
CHAT_TURNS: Final = (
    f"Here is the beginning of a poem by William Shakespeare:\n\n{POEM}\n\nWhat does the poet compare the summer's day with?",
    "Thank you. Now say it in one short sentence.",
)


def document() -> str:
    """The text that all questions are about; see DOCUMENT.md."""
    return files("cluster.demo").joinpath("document.txt").read_text(encoding="utf-8")


def about_document(question: str) -> Conversation:
    """The question after the whole document, so that all questions begin with the same tokens."""
    text = f"Read this chapter of a book, then answer the question below it.\n\n{document()}\n\nQuestion: {question}"
    return [{"role": "user", "content": text}]
