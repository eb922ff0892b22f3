"""Deployments in files: one model in TOML, several in JSON; any setting by its flag's name."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.config import (
    ConfigError,
    EngineConfig,
    ServerConfig,
    all_settings,
    override,
    settings_of,
)

# Keys of the TOML tables that are not settings by their own name.
_TOML_NAMES = {
    ("model", "path"): "model",
    ("server", "parallelism"): "tensor_parallel",
    ("acceleration", "use_flash_attn"): "attention",
}
_TABLES = ("model", "server", "engine", "acceleration")

_OF_THE_PROCESS = ("num_threads", "compilation_cache_dir")
_MODEL_KEYS = (
    *("name", "path", "served_model_name", "load"),
    *(item.name for item in settings_of(EngineConfig) if item.name != "model"),
)


@dataclass(frozen=True)
class ModelEntry:
    """One of the models to serve.

    Attributes:
      config: which model, and how it runs.
      names: what clients call it; none for the model's own name.
      loads_at_start: whether the server loads it by itself.
    """

    config: EngineConfig
    names: tuple[str, ...] = ()
    loads_at_start: bool = True


def load_toml(path: str | Path) -> tuple[EngineConfig, ServerConfig]:
    """Reads a deployment: any setting by its flag's name, in the tables [model] [engine] [server].

    `[model] path`, `[server] parallelism` and `[acceleration] use_flash_attn` are understood too.

    Raises:
      ConfigError: the file is missing, is no TOML, has an unknown key, or a value does not fit.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error}") from error
    values: dict[str, Any] = {}
    for table, entries in document.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: key {table!r} stands outside a table; use [engine] ...")
        if table not in _TABLES:
            raise ConfigError(_unknown(path, f"[{table}]", table, _TABLES))
        for key, value in entries.items():
            name = _TOML_NAMES.get((table, key)) or _setting_name(key)
            if name not in all_settings():
                raise ConfigError(_unknown(path, f"{key!r} in [{table}]", key, _toml_keys(table)))
            values.update(_toml_value(path, table, key, name, value))
    try:
        return override(EngineConfig(), values), override(ServerConfig(), values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _setting_name(key: str) -> str:
    """Returns the setting that a key means: its name, or another flag for it."""
    name = key.replace("-", "_")
    for setting in all_settings().values():
        if "--" + key.replace("_", "-") in setting.aliases:
            return setting.name
    return name


def _toml_value(path: str | Path, table: str, key: str, name: str, value: Any) -> dict[str, Any]:
    if (table, key) == ("acceleration", "use_flash_attn") and isinstance(value, bool):
        return {} if value else {"attention": "reference"}
    where = f"{path}: {key!r} in [{table}]"
    extra = {"allow_fewer_devices": True} if key == "parallelism" else {}
    return {name: _checked(where, name, value), **extra}


def _checked(where: str, name: str, value: Any) -> Any:
    try:
        return all_settings()[name].check(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _toml_keys(table: str) -> list[str]:
    renamed = [key for owner, key in _TOML_NAMES if owner == table]
    return [*renamed, *all_settings()]


def _unknown(path: str | Path, what: str, key: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.0)
    return f"{path}: unknown {what}; the nearest known name is {nearest[0]!r}"


def load_models(path: str | Path, base: EngineConfig) -> tuple[ModelEntry, ...]:
    """Reads several models: `{"models": [{"name", "path", "chat_template", ...}, ...]}`.

    Besides those keys a model may have any setting of an engine by its flag's name, which comes
    before `base`; `served_model_name`, more names for it; and `"load": false`, not to be loaded at
    start.

    Raises:
      ConfigError: the file is missing, is no JSON, has an unknown key or a value that does not fit;
        a name is there twice, or a path leads nowhere.
    """
    try:
        document = json.loads(
            Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"config_path {str(path)!r} cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("models"), list):
        raise ConfigError(f'{path}: must be an object {{"models": [{{"name", "path"}}, ...]}}')
    for key in document:
        if key != "models":
            raise ConfigError(_unknown(path, f"key {key!r}", key, ["models"]))
    if not document["models"]:
        raise ConfigError(f"{path}: models is empty; name one at least")
    entries = tuple(
        _model_entry(f"{path}: models[{number}]", values, base)
        for number, values in enumerate(document["models"])
    )
    seen: set[str] = set()
    for name in (name for entry in entries for name in entry.names):
        if name in seen:
            raise ConfigError(f"{path}: two models are called {name!r}; give one another name")
        seen.add(name)
    return entries


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"key {repeated!r} is there twice")
    return values


def _model_entry(where: str, values: Any, base: EngineConfig) -> ModelEntry:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object with a name and a path (got {values!r})")
    own: dict[str, Any] = {}
    for key, value in values.items():
        name = key if key in _MODEL_KEYS else _setting_name(key)
        if name in _OF_THE_PROCESS:
            raise ConfigError(f"{where}: {key!r} is the same for all models; give --{key} instead")
        if name not in _MODEL_KEYS:
            raise ConfigError(_unknown(where, f"key {key!r}", key, _MODEL_KEYS))
        if value is not None:
            own[name] = value
    for key in ("name", "path"):
        if not isinstance(own.get(key), str) or not own[key].strip():
            raise ConfigError(f"{where}: {key!r} must be a text (got {own.get(key)!r})")
    loads = own.pop("load", True)
    if not isinstance(loads, bool):
        raise ConfigError(f"{where}: 'load' must be true or false (got {loads!r})")
    more_names = _checked(where, "served_model_name", own.pop("served_model_name", []))
    names = (own.pop("name"), *more_names)
    _check_path(where, own["path"])
    settings = {"model": own.pop("path")}
    settings |= {name: _checked(where, name, value) for name, value in own.items()}
    try:
        return ModelEntry(override(base, settings), tuple(dict.fromkeys(names)), loads)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_path(where: str, path: str) -> None:
    # Flags and --help do without what this imports.
    from jaxinfer.checkpoint.hub import is_local

    try:
        is_local(path)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
