"""Where settings are written: a YAML file, the environment, ``--set``. Each is read into a list of :class:`Setting`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.config.errors import ConfigError
from cluster.config.keys import ENV_OTHERS, ENV_PREFIX, env_name, is_list, known_fields, nearest_env, nearest_key
from cluster.config.schema import SIZES, ClusterConfig

FILE_BYTES_MAX: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written. ``origin`` says where, for people: ``flag --port``, ``file moonpool.yaml line 3``."""

    key: str
    value: Any
    origin: str


def from_environment(environment: Mapping[str, str]) -> list[Setting]:
    """All variables with our prefix. Raises :class:`ConfigError` on one that names no setting."""
    names = {env_name(key): key for key in known_fields()}
    settings: list[Setting] = []
    problems: list[str] = []
    for name, text in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX) or name in ENV_OTHERS:
            continue
        if name in names:
            settings.append(Setting(names[name], from_text(names[name], text), f"environment {name}"))
        else:
            problems.append(f"environment {name}: no such setting; the nearest is {nearest_env(name)}")
    if problems:
        raise ConfigError(problems)
    return settings


def from_sets(assignments: Sequence[str]) -> list[Setting]:
    """``section.field=value`` each. Raises :class:`ConfigError` on any that is not."""
    settings: list[Setting] = []
    problems: list[str] = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals:
            problems.append("flag --set: expected section.field=value")
        elif key not in known_fields():
            problems.append(_unknown(key, "flag --set"))
        else:
            settings.append(Setting(key, from_text(key, text.strip()), f"flag --set {key}"))
    if problems:
        raise ConfigError(problems)
    return settings


def from_file(path: Path) -> list[Setting]:
    """A YAML mapping of sections. Raises :class:`ConfigError` on anything else, naming the line."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError([f"file {path}: {error.strerror or error}"]) from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError([f"file {path}: longer than {FILE_BYTES_MAX} bytes"])
    loader = yaml.SafeLoader(content)
    try:
        root = loader.get_single_node()
        found = list(_walk(loader, root, path)) if root is not None else []
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"file {path}: not YAML ({_where(error)})"]) from error
    finally:
        loader.dispose()
    problems = [item for item in found if isinstance(item, str)]
    if problems:
        raise ConfigError(problems)
    return [item for item in found if isinstance(item, Setting)]


def from_text(key: str, text: str) -> Any:
    """A flag's or variable's text as the field takes it: a list by commas (or as a YAML list), anything else as it stands."""
    if not is_list(key):
        return text
    if text.lstrip().startswith("["):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text  # the schema says what is wrong with it
    return [item.strip() for item in text.split(",") if item.strip()]


def _walk(loader: yaml.SafeLoader, root: yaml.Node, path: Path) -> Iterator[Setting | str]:
    """Settings, and a sentence for everything that is not one."""
    seen: set[str] = set()
    if not isinstance(root, yaml.MappingNode):
        yield f"file {path}: expected sections ({', '.join(ClusterConfig.model_fields)})"
        return
    for section_node, fields_node in root.value:
        section = _name(section_node)
        where = f"file {path} line {section_node.start_mark.line + 1}"
        if section not in ClusterConfig.model_fields:
            yield _unknown(section, where)
        elif _is_null(fields_node):
            continue
        elif not isinstance(fields_node, yaml.MappingNode):
            yield f"{where}: {section}: expected fields below the section's name"
        else:
            for field_node, value_node in fields_node.value:
                key = f"{section}.{_name(field_node)}"
                where = f"file {path} line {field_node.start_mark.line + 1}"
                if key not in known_fields():
                    yield _unknown(key, where)
                elif key in seen:
                    yield f"{where}: {key} is set twice"
                else:
                    seen.add(key)
                    yield Setting(key, _plain(key, loader.construct_object(value_node, deep=True)), where)


def _plain(key: str, value: Any) -> Any:
    """A size may be written as a number of bytes."""
    return str(value) if key in SIZES and isinstance(value, int) and not isinstance(value, bool) else value


def _name(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "(not a name)"


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _unknown(key: str, where: str) -> str:
    return f"{where}: no setting {key!r}; the nearest is {nearest_key(key)!r}"


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}" if mark is not None else type(error).__name__
