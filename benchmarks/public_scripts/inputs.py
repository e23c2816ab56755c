"""What the public scripts read: corpora, graphs, pictures, and small pretrained models, all made here.

Here: files beside a copy of a script, under the names that it asks for. Not here: torchvision's datasets
(`support/torchvision`), the copies themselves (`check.py`).
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np


def make_inputs(name: str, data: Path, folder: Path) -> None:
    """Write what the script `name` of `scripts.toml` reads into `folder`."""
    for part, make in _MAKERS.items():
        if part in name:
            make(data, folder)


def _text(data: Path) -> str:
    return (data / "tinyshakespeare" / "input.txt").read_text()


def _corpus(data: Path, folder: Path) -> None:
    (folder / "corpus").mkdir()
    words = _text(data).split()[:4250]
    for part, (low, high) in {"train": (0, 3950), "valid": (3950, 4100), "test": (4100, 4250)}.items():
        (folder / "corpus" / f"{part}.txt").write_text("\n".join(" ".join(words[low:high]).split("\n")))


def _characters(data: Path, folder: Path) -> None:
    (folder / "data" / "characters").mkdir(parents=True)
    codes = np.frombuffer(_text(data)[:50_000].encode("ascii", "replace"), np.uint8).astype(np.uint16)
    for part, chosen in {"train": codes[:45_000], "val": codes[45_000:]}.items():
        chosen.tofile(folder / "data" / "characters" / f"{part}.bin")


def _citations(data: Path, folder: Path) -> None:
    (folder / "cora").mkdir()
    (folder / "cora" / "cora.content").write_bytes(gzip.decompress((data / "cora" / "cora.content.gz").read_bytes()))
    shutil.copy(data / "cora" / "cora.cites", folder / "cora")


def _pictures(data: Path, folder: Path) -> None:
    del data
    from PIL import Image

    (folder / "pets").mkdir()
    random = np.random.RandomState(0)
    for number in range(120):
        pixels = random.randint(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "pets" / f"{('cat', 'dog', 'owl')[number % 3]}_{number}.jpg")


def _pairs_of_sentences(data: Path, folder: Path) -> None:
    """GLUE's MRPC in the hub's layout: pairs of lines, some of them twice the same. And a small BERT to train."""
    lines = [line for line in _text(data).splitlines() if len(line.split()) > 3]
    glue = folder / "nyu-mll" / "glue"
    (glue / "mrpc").mkdir(parents=True)
    random = np.random.RandomState(0)
    for part, count in (("train", 100), ("validation", 40)):
        with (glue / "mrpc" / f"{part}.jsonl").open("w") as file:
            for number in range(count):
                a, b = random.randint(0, 1000, 2)
                label = int(random.randint(2))
                pair = {"sentence1": lines[a], "sentence2": lines[a if label else b]}
                print(json.dumps({**pair, "label": label, "idx": number}), file=file)
    files = [f"      - split: {part}\n        path: mrpc/{part}.jsonl\n" for part in ("train", "validation")]
    (glue / "README.md").write_text(
        "---\nconfigs:\n  - config_name: mrpc\n    data_files:\n" + "".join(files) + "---\n"
    )
    _bert(folder / "bert-base-cased")


def _bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder.mkdir()
    letters = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False, model_max_length=128).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


def _lines_and_tokenizer(data: Path, folder: Path) -> None:
    """A text in lines, and a tokenizer of its letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = _text(data)[:24_000]
    (folder / "lines.txt").write_text(text)
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", model_max_length=64).save_pretrained(
        folder / "letters"
    )


_MAKERS = {
    "word_language_model": _corpus,
    "nanoGPT": _characters,
    "gcn": _citations,
    "cv_example": _pictures,
    "nlp_example": _pairs_of_sentences,
    "run_clm": _lines_and_tokenizer,
}
"""By a part of the script's name."""
