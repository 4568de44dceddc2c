"""Check of a saved state against a table with a rule for each field.

Every error names the field, its value in the state, and the values that are valid. The check changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hybridloader.errors import StateError


class Rule(NamedTuple):
    """Condition of a field, in words and as a function."""

    words: str
    fits: Callable[[Any], bool]


ANY = Rule("anything", lambda value: True)
WHOLE = Rule("a whole number", lambda value: type(value) is int)
COUNT = Rule("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
TEXT = Rule("a text", lambda value: isinstance(value, str))
TRUTH = Rule("True or False", lambda value: isinstance(value, bool))
LIST = Rule("a list", lambda value: isinstance(value, (list, tuple)))
DICT = Rule("a dict", lambda value: isinstance(value, Mapping))


def up_to(most: int) -> Rule:
    words = f"a whole number from 0 to {most}"
    return Rule(words, lambda value: type(value) is int and 0 <= value <= most)


def among(*values: str) -> Rule:
    return Rule(f"one of {', '.join(map(repr, values))}", lambda value: value in values)


def list_of(rule: Rule, words: str) -> Rule:
    return Rule(
        words, lambda value: LIST.fits(value) and bool(value) and all(map(rule.fits, value))
    )


def dict_of(rule: Rule, words: str) -> Rule:
    def fits(value: Any) -> bool:
        keys_and_values = value.items() if DICT.fits(value) else [(None, None)]
        return all(type(key) is str and rule.fits(one) for key, one in keys_and_values)

    return Rule(words, fits)


def place_dropped(epoch: int, place: int) -> str:
    """Return the warning that `set_epoch` drops the position of a state, which is in epoch `place`."""
    return (
        f"set_epoch({epoch}) drops the position that was loaded, which is in epoch {place}; load the "
        "state after set_epoch(), or start with that epoch"
    )


class Schema:
    """Fields of a state."""

    def __init__(
        self,
        of: str,  # owner of the state, for errors
        *table: tuple[Rule, str],  # a rule and the names of its fields; optional ones end in ``?``
        version: int | None = None,  # version that can be read; None: the state has no version
        kind: tuple[str, str] | None = None,  # field that names the owner, and its value
        exact: bool = False,  # refuse other fields
    ) -> None:
        named = [(name, rule) for rule, names in table for name in names.split()]
        self.of, self.version, self.kind, self.exact = of, version, kind, exact
        self._rules = {name.rstrip("?"): rule for name, rule in named}
        self._needed = {name for name, _ in named if not name.endswith("?")}
        self._headers = {"version"} if version is not None else set()
        if kind is not None:
            self._headers.add(kind[0])

    def check(self, state: Any, agreement: Mapping[str, Any] | None = None) -> None:
        """Raise `StateError` for the first field of `state` that breaks a rule.

        `agreement` maps the names of further fields to the values that they must have.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"the state of a {self.of} is a dict, got {type(state).__name__}")
        self._check_kind(state)
        agreement = agreement or {}
        for name, here in agreement.items():
            there = state.get(name, here)
            if there != here or isinstance(there, bool) != isinstance(here, bool):
                raise StateError(
                    f"{name} is {there!r} in the state and {here!r} in this {self.of}; make the "
                    f"{self.of} with the arguments that it had when the state was taken"
                )
        if missing := {*self._needed, *agreement} - {*state}:
            raise StateError(f"the state lacks {_listed(missing)}: was it truncated?")
        if self.exact and (foreign := {*state} - {*self._rules, *agreement, *self._headers}):
            raise StateError(
                f"the state has {_listed(foreign)}, which no state of this version has"
            )
        for name, rule in self._rules.items():
            if name in state and not rule.fits(state[name]):
                raise StateError(
                    f"{name} is {state[name]!r:.80} in the state, and must be {rule.words}"
                )

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if not state.keys() >= self._headers:
            raise StateError(f"this is not the state of a {self.of}: it has {_listed(state)}")
        if self.kind is not None and state[self.kind[0]] != self.kind[1]:
            raise StateError(
                f"this is the state of a {state[self.kind[0]]}, not of a {self.kind[1]}"
            )
        version = state.get("version")
        if self.version is not None and (type(version) is not int or version != self.version):
            raise StateError(
                f"version is {version!r} in the state, and this hybridloader reads {self.version}; "
                "load it with the hybridloader that saved it"
            )


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"
