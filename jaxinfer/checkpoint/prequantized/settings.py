"""A quantization_config while it is read: every value is checked where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.checkpoint import CheckpointError


class Settings:
    """An object of config.json; every error names the file, the key, the value and the rule."""

    def __init__(self, values: Mapping[str, Any], where: str, keys: str = "") -> None:
        """Wraps `values`, which the keys `keys` lead to in the file or tensor `where`."""
        self.values = values
        self.where = where
        self.keys = keys

    def path(self, key: str) -> str:
        """The way to the value of `key`: `quantization_config.bits`."""
        return f"{self.keys}.{key}" if self.keys else key

    def error(self, key: str, rule: str) -> CheckpointError:
        """Returns the error that says what is wrong with the value of `key`."""
        return CheckpointError(
            f"{self.where}: {self.path(key)} is {_short(self.values.get(key))}: {rule}"
        )

    def integer(self, key: str, allowed: tuple[int, ...], default: int | None = None) -> int:
        """Returns an integer, one of `allowed`."""
        value = self.values.get(key, default)
        if type(value) is not int or value not in allowed:
            raise self.error(key, f"supported are {', '.join(map(str, allowed))}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Returns true or false; null and an absent key mean `default`."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Returns a string, one of `allowed`, in lower case."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.error(key, f"supported are {', '.join(allowed)}")
        return value.lower()

    def strings(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings; null and an absent key mean none."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return tuple(value)

    def section(self, key: str) -> Settings | None:
        """Returns an object inside; None where it is null or absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return Settings(value, self.where, self.path(key))


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
