"""Writes ``docs/configuration.md`` from the models: ``python -m cluster.config.reference [FILE]``."""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from cluster.config.flags import FLAGS
from cluster.config.keys import ENV_OTHERS, env_name, section_models
from cluster.config.schema import SECRETS, SIZES

TARGET: Final = Path("docs/configuration.md")
BOUNDS: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}

HEAD: Final = """\
# Configuration

Made from the models by `python -m cluster.config.reference`; a test fails where this page and the models differ.

Every setting can be written in four places; the first that has it wins:

1. a flag: one of the short ones below, or `--set section.field=value` for any setting;
2. an environment variable: `MOONPOOL_SECTION__FIELD`;
3. a YAML file, named by `--config FILE` or `MOONPOOL_CONFIG`: sections with fields below them;
4. the default.

A name that does not exist, in any of them, is an error that names the nearest one that does and where the wrong one stands.
`moonpool config` prints every value in force with the place it came from. Lists are written with commas
(`--set gateway.api_keys=one,two`); sizes as `2GiB`, `512MiB`, `1GB` or plain bytes. Values that do not fit each other (a chunk
that is not a multiple of a block, say) are refused before anything starts.

```yaml
# moonpool.yaml
model:
  dtype: float32
prefill:
  workers: 2
decode:
  workers: 2
pool:
  dram: 4GiB
gateway:
  port: 8000
```
"""


def render() -> str:
    """The whole page."""
    short = {key: flag for flag, key in FLAGS.values()}
    parts = [HEAD, _flags()]
    for section, model in section_models().items():
        parts.append(f"## `{section}`\n\n{_sentence(model)}\n")
        for name, field in model.model_fields.items():
            parts.append(_entry(f"{section}.{name}", field, short))
    return "\n".join(parts)


def _flags() -> str:
    rows = [f"| `{flag}` | `{key}` |" for flag, key in FLAGS.values()]
    others = [f"| `{name}` | {meaning} |" for name, meaning in ENV_OTHERS.items()]
    return "\n".join(
        ["## Short flags", "", "| flag | setting |", "|---|---|", *rows, "",
         "## Other environment variables", "", "| variable | meaning |", "|---|---|", *others, ""]
    )  # fmt: skip


def _sentence(model: type[Any]) -> str:
    text = " ".join((inspect.getdoc(model) or "").split())
    return "" if text.startswith("The ``") else text.replace("``", "`")


def _entry(key: str, field: FieldInfo, short: dict[str, str]) -> str:
    flag = f", `{short[key]}`" if key in short else ""
    facts = [_type(key, field.annotation), *_bounds(field), f"default {_shown(field.default)}"]
    secret = " Never shown or logged." if key in SECRETS else ""
    return f"**`{key}`** ({', '.join(facts)}; `{env_name(key)}`{flag})  \n{field.description}{secret}\n"


def _type(key: str, annotation: Any) -> str:
    if key in SIZES:
        return "size"
    if get_origin(annotation) is Literal:
        return " / ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_type('', get_args(annotation)[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " / ".join(f"`{member.value}`" for member in annotation)
    return {"str": "text", "int": "integer", "float": "number", "bool": "yes or no"}.get(annotation.__name__, annotation.__name__)


def _bounds(field: FieldInfo) -> list[str]:
    found = [(name, getattr(item, name, None)) for item in field.metadata for name in BOUNDS]
    return [f"{BOUNDS[name]} {bound:g}" for name, bound in found if bound is not None]


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return "empty" if value in ("", ()) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
