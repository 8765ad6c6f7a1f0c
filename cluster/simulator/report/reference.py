"""Writes ``docs/report.schema.json`` from the models: ``python -m cluster.simulator.report.reference [FILE]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from pydantic.json_schema import models_json_schema

from cluster.simulator.report.schema import CacheOnlyReport, Report, RequestRow

TARGET: Final = Path("docs/report.schema.json")
ABOUT: Final = (
    "Made by `python -m cluster.simulator.report.reference`. Report: report.json of a run; CacheOnlyReport: report.json of "
    "--cache-only; RequestRow: a line of requests.jsonl."
)


def render() -> str:
    """JSON schema (draft 2020-12) of a run's files, one definition a model."""
    models = [(model, "serialization") for model in (Report, CacheOnlyReport, RequestRow)]
    _, schema = models_json_schema(models, title="Reports of moonpool", description=ABOUT)  # pyright: ignore[reportArgumentType]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=1) + "\n"


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
