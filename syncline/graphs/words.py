"""Texts as features: which of the most frequent words each of them has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_WORD = re.compile(r"[^\W_]+")


def bag_of_words(texts: Sequence[str], most: int) -> csr_matrix:
    """A row for each text, of length 1, with equal values for its words; of these the `most` frequent count."""
    from scipy.sparse import csr_matrix

    found = [sorted(set(_WORD.findall(text.lower()))) for text in texts]
    counts = Counter(word for words in found for word in words)
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))[:most]
    place = {word: number for number, word in enumerate(vocabulary)}
    rows = [[place[word] for word in words if word in place] for words in found]
    lengths = np.array([len(row) for row in rows])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = np.array([column for row in rows for column in sorted(row)], np.int64)
    values = np.repeat(1 / np.sqrt(np.maximum(lengths, 1)), lengths).astype(np.float32)
    return csr_matrix((values, columns, offsets), shape=(len(texts), max(len(vocabulary), 1)))
