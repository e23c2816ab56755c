"""Linear regression with an L1 penalty: the elastic net without its L2 part.

Minimizes |y - Xw - b|^2 / (2 n) + alpha |w|_1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from syncline.blocks.apps.elastic_net import ElasticNet


@dataclass(frozen=True, kw_only=True)
class Lasso(ElasticNet):
    """Sparse linear regression; most coefficients are zero."""

    name: ClassVar[str] = "lasso"
    summary: ClassVar[str] = "linear regression with an L1 penalty, which makes most coefficients zero"

    l1_ratio: float = field(default=1.0, init=False)

    @classmethod
    def options(cls) -> dict[str, Any]:
        return {name: default for name, default in super().options().items() if name != "l1_ratio"}
