"""The next catalog: a new version of a model, its end, and the end of a canary. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from syncline.serving.server.catalog import Catalog, ServedVersion, Withdrawn

__all__ = ["next_version", "replaced", "rolled_back", "unloaded"]

_MOST_WITHDRAWN = 100
"""How many versions that ended are listed; a run that is followed has a new one every few seconds."""


def next_version(catalog: Catalog, model: str) -> str:
    """A number that this model has not had.

    >>> next_version(Catalog(versions=(ServedVersion(model="a", version="3", path=""),)), "a")
    '4'
    """
    served = [one.version for one in catalog.versions if one.model == model]
    used = served + [one.version for one in catalog.withdrawn if one.model == model]
    return str(1 + max(map(int, used), default=0))


def replaced(catalog: Catalog, old: ServedVersion | None, new: ServedVersion, reason: str) -> Catalog:
    """`new` takes the place and the role of `old`; without an `old`, it is added."""
    number = next_version(catalog, new.model)
    new = msgspec.structs.replace(new, version=number)
    if old is None or old not in catalog.versions:
        return _with(catalog, (*catalog.versions, new), ())
    versions = tuple(new if one == old else one for one in catalog.versions)
    return _with(catalog, versions, [_withdraw(old, reason)])


def unloaded(catalog: Catalog, model: str, reason: str) -> Catalog:
    """All versions of the model end."""
    ended = [one for one in catalog.versions if one.model == model]
    kept = tuple(one for one in catalog.versions if one.model != model)
    return _with(catalog, kept, [_withdraw(one, reason) for one in ended])


def rolled_back(catalog: Catalog, model: str, version: str, reason: str) -> Catalog:
    """The canary ends; nothing changes if it is not one any more."""
    found = [one for one in catalog.versions if one.key == (model, version) and one.role == "canary"]
    kept = tuple(one for one in catalog.versions if one not in found)
    return _with(catalog, kept, [_withdraw(one, f"rolled back: {reason}") for one in found])


def _withdraw(one: ServedVersion, reason: str) -> Withdrawn:
    return Withdrawn(model=one.model, version=one.version, reason=reason)


def _with(catalog: Catalog, versions: tuple[ServedVersion, ...], ended: Iterable[Withdrawn]) -> Catalog:
    withdrawn = (*catalog.withdrawn, *ended)[-_MOST_WITHDRAWN:]
    return Catalog(generation=catalog.generation, versions=versions, withdrawn=withdrawn)
