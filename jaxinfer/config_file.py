"""A deployment in a TOML file: any setting by its flag's name."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from jaxinfer.config import ConfigError, EngineConfig, ServerConfig, all_settings, override

# Keys of the TOML tables that are not settings by their own name.
_TOML_NAMES = {
    ("model", "path"): "model",
    ("server", "parallelism"): "tensor_parallel",
    ("acceleration", "use_flash_attn"): "attention",
}
_TABLES = ("model", "server", "engine", "acceleration")


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
            name = _TOML_NAMES.get((table, key), key.replace("-", "_"))
            if name not in all_settings():
                raise ConfigError(_unknown(path, f"{key!r} in [{table}]", key, _toml_keys(table)))
            values.update(_toml_value(path, table, key, name, value))
    try:
        return override(EngineConfig(), values), override(ServerConfig(), values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _toml_value(path: str | Path, table: str, key: str, name: str, value: Any) -> dict[str, Any]:
    if (table, key) == ("acceleration", "use_flash_attn") and isinstance(value, bool):
        return {} if value else {"attention": "reference"}
    where = f"{path}: {key!r} in [{table}]"
    try:
        checked = all_settings()[name].check(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    extra = {"allow_fewer_devices": True} if key == "parallelism" else {}
    return {name: checked, **extra}


def _toml_keys(table: str) -> list[str]:
    renamed = [key for owner, key in _TOML_NAMES if owner == table]
    return [*renamed, *all_settings()]


def _unknown(path: str | Path, what: str, key: str, known: Any) -> str:
    nearest = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.0)
    return f"{path}: unknown {what}; the nearest known name is {nearest[0]!r}"
