"""Optimisers that torch.optim lacks: plain torch optimisers, one file each."""

from syncline.optimizers.adabelief import AdaBelief
from syncline.optimizers.lamb import LAMB
from syncline.optimizers.lars import LARS
from syncline.optimizers.lion import Lion
from syncline.optimizers.yogi import Yogi

__all__ = ["LAMB", "LARS", "AdaBelief", "Lion", "Yogi"]
