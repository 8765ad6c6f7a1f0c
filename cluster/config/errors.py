"""What is wrong with a configuration, in words for the person who wrote it."""

from __future__ import annotations


class ConfigError(ValueError):
    """One line per problem; each names the key and where its value was found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
