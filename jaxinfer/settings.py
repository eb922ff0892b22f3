"""One table of settings: dataclass fields from which flags and TOML keys are both derived.

A leaf: imports nothing of ours and no jax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, its value, the rule and the way out."""


def parse_bytes(text: str | int) -> int:
    """Returns a number of bytes from 4096, '512MB' (powers of 1000) or '2GiB' (powers of 1024)."""
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write bytes, or a number with KB, MiB, GB ...")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def flag(
    default: Any,
    about: str | None,
    *,
    aliases: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    bare: Any = None,
    secret: bool = False,
) -> Any:
    """Declares a setting: its default, what `--help` says, and how text becomes its value."""
    metadata = {"about": about, "aliases": aliases, "parse": parse, "bare": bare}
    return field(default=default, repr=not secret, metadata=metadata)


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raises ConfigError with the rule unless the condition holds."""
    if not condition:
        raise ConfigError(f"{name} {rule} (got {value!r})")


def require_choice(name: str, value: object, *choices: object) -> None:
    """Raises ConfigError unless the value is one of the choices."""
    rule = f"must be {', '.join(map(str, choices[:-1]))} or {choices[-1]}"
    require(value in choices, name, value, rule)


def require_share(name: str, value: float) -> None:
    """Raises ConfigError unless the value is a part of something."""
    require(0 < value <= 1, name, value, "must be above 0 and at most 1")


ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


@dataclass(frozen=True)
class Setting:
    """One field of a configuration, as a flag and as a TOML key.

    Attributes:
      name: the field.
      kind: str, int, float or bool, or the element type when `is_list`.
      is_list: whether the flag may be repeated.
      about: what `--help` says; None keeps it out of the list.
      aliases: other flags for it.
      parse: makes a value of text that is not simply of that kind.
      bare: what the flag means without a value; None if it needs one.
    """

    name: str
    kind: type
    is_list: bool
    about: str | None
    aliases: tuple[str, ...]
    parse: Callable[[str], Any] | None
    bare: Any

    def check(self, value: object) -> Any:
        """Returns a value from TOML as the field's type.

        Raises:
          ConfigError: it has another type.
        """
        if self.is_list:
            items = value if isinstance(value, list) else [value]
            return tuple(self._check_one(item) for item in items)
        return self._check_one(value)

    def _check_one(self, value: object) -> Any:
        if self.parse is not None and isinstance(value, str | int) and value is not True:
            return self.parse(str(value))
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{self.name} must be {self.kind.__name__}, got {value!r}")
        return value


def settings_of(config: type[DataclassInstance]) -> tuple[Setting, ...]:
    """Returns the settings of a configuration class in the order of its fields."""
    kinds: Mapping[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
    found = []
    for item in fields(config):
        annotation = str(item.type)
        is_list = annotation.startswith("tuple[")
        kind = kinds[annotation.removeprefix("tuple[").split(",")[0].split(" ")[0]]
        found.append(Setting(item.name, kind, is_list, **item.metadata))
    return tuple(found)


def override(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """Returns the configuration with those `values` that are fields of it."""
    own = {item.name for item in fields(config)}
    return replace(config, **{name: value for name, value in values.items() if name in own})
