"""The apps of `syncline.fit` by name. A new one is a new line here and one new file."""

from __future__ import annotations

import importlib

from syncline.blocks.app import App
from syncline.config.spec import Spec
from syncline.errors import UnknownName

__all__ = ["APPS", "app_class", "make_app"]

APPS = {
    "lasso": "lasso:Lasso",
    "als": "als:ALS",
    "elastic-net": "elastic_net:ElasticNet",
    "k-means": "k_means:KMeans",
}
"""The file and the class of each app."""


def app_class(name: str) -> type[App]:
    """The class of the app with this name."""
    if name not in APPS:
        raise UnknownName.among("app of fit", name, APPS)
    module, _, attribute = APPS[name].partition(":")
    found: type[App] = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    return found


def make_app(model: object) -> App:
    """The app that `lasso(alpha=0.1)` names."""
    if isinstance(model, App):
        return model
    spec = Spec.of(model, what="model")
    return app_class(spec.name).make(spec.options)
