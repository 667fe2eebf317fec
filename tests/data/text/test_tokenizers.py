"""Round trips, determinism and agreement with the library the tokenizers come from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from polyvision.data.text.tokenizer_spec import TokenizerSpec, parse_tokenizer
from polyvision.data.text.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    _learnable,
    _pieces,
    tokenizer_from_json,
)
from polyvision.errors import PolyvisionError

SAMPLE = "the whale, the white whale\u2014the sea; \u201cthe sea!\u201d\n\nthe whale's way\n" * 3
BPE = BPETokenizer.train([SAMPLE], 270)
BOTH = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
# Characters on which GPT-2's pre-tokenization turns, and others.
TEXT = st.text(st.sampled_from("ab \n\r\t\v\x1c\u00a0\u2003\u3000.,'!7\u00e9\u4e00\U0001f40b"))


@BOTH
@given(text=st.text())
@settings(deadline=None)
def test_round_trip_and_byte_counts(tokenizer: Tokenizer, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # a lone surrogate is not text
        return
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == size


@BOTH
def test_any_sequence_of_tokens_decodes(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([]) == ""
    every = range(tokenizer.vocab_size)
    assert tokenizer.decode(every) == b"".join(tokenizer.vocabulary).decode(errors="replace")
    euro = tokenizer.encode("\u20ac")
    assert tokenizer.decode(euro[:-1]) == "\ufffd"


@BOTH
def test_the_vocabulary_covers_all_bytes_once(
    tokenizer: Tokenizer,
) -> None:
    assert len(set(tokenizer.vocabulary)) == tokenizer.vocab_size == len(tokenizer.byte_lengths)
    assert {bytes([b]) for b in range(256)} <= set(tokenizer.vocabulary)
    assert tokenizer.byte_lengths.tolist() == [len(token) for token in tokenizer.vocabulary]


@BOTH
@pytest.mark.parametrize("wrong", [-1, 300])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(PolyvisionError, match=f"token id {wrong} is outside the vocabulary of"):
        tokenizer.decode([0, wrong])


@BOTH
def test_json_restores_the_tokenizer(tokenizer: Tokenizer) -> None:
    restored = tokenizer_from_json(tokenizer.to_json())
    assert type(restored) is type(tokenizer)
    assert restored.fingerprint == tokenizer.fingerprint
    assert restored.vocabulary == tokenizer.vocabulary
    assert restored.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()


def test_merges_are_learned() -> None:
    assert BPE.vocab_size == 270
    assert b" whale" in BPE.vocabulary
    assert len(BPE.encode(SAMPLE)) < len(SAMPLE.encode()) / 2
    assert BPETokenizer.train([""], 300).vocab_size == 256  # nothing occurs twice
    assert BPETokenizer.train([SAMPLE], 269).fingerprint != BPE.fingerprint


def test_training_is_deterministic_across_processes() -> None:
    code = (
        "import sys; from polyvision.data.text.tokenizers import BPETokenizer as B;"
        "print(B.train([sys.stdin.read()], 270).fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=SAMPLE,
        env=os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.strip() == BPE.fingerprint


@given(text=TEXT, size=st.integers(1, 5))
@settings(deadline=None, max_examples=300)
def test_cutting_a_long_text_does_not_change_its_tokens(text: str, size: int) -> None:
    whole = hf.Tokenizer.from_str(BPE.to_json())
    pieces = list(_pieces(text, size))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in whole.encode(piece).ids] == whole.encode(text).ids


def test_a_text_of_many_pieces() -> None:
    text = SAMPLE * 3000
    assert len(list(_pieces(text))) > 5
    assert BPE.encode(text).tolist() == hf.Tokenizer.from_str(BPE.to_json()).encode(text).ids


@pytest.mark.parametrize(
    "text",
    [
        "a" * 5000,
        " " * 5000 + "x",
        "ACGT" * 2000,
        "\u4e00\u4e8c\u4e09" * 1000,
        "the whale " + "ab" * 600 + " the sea " + "\n" * 700,
    ],
)
def test_unbroken_runs_are_learned_from_in_parts_and_encoded_whole(text: str) -> None:
    parts = list(_learnable(text))
    assert "".join(parts) == text
    assert max(len(run) for part in parts for run in re.findall(r"\S+|\s+", part)) == 256
    tokenizer = BPETokenizer.train([text], 400)
    assert max(len(token.decode(errors="replace")) for token in tokenizer.vocabulary) <= 256
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.tolist() == hf.Tokenizer.from_str(tokenizer.to_json()).encode(text).ids


def test_runs_that_are_short_enough_change_nothing() -> None:
    text = "a" * 256 + " " * 255 + SAMPLE
    assert list(_learnable(text)) == [text]


def test_a_run_of_more_than_a_million_characters_is_cut_without_loss() -> None:
    text = "ab" * ((1 << 20) // 2) + "ba" * 200 + " and the sea"
    assert next(len(piece) for piece in _pieces(text)) == 1 << 20
    assert BPE.decode(BPE.encode(text)) == text


@pytest.mark.parametrize("name", ["<|im_end|>", "</s>", "<|endoftext|>"])
def test_the_end_token_by_name(name: str) -> None:
    tokenizer = BPETokenizer.train([SAMPLE], 270, end_token=name)
    assert (tokenizer.end, tokenizer.end_name, tokenizer.vocab_size) == (0, name, 270)
    assert tokenizer_from_json(tokenizer.to_json()).end_name == name
    ids = tokenizer.encode(f"the {name} sea")
    assert 0 not in ids
    assert tokenizer.decode(ids) == f"the {name} sea"


def test_an_end_token_that_is_chosen_comes_before_the_usual_names() -> None:
    library = hf.Tokenizer.from_str(BPE.to_json())
    library.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<pad>"])
    tokenizer = BPETokenizer(library.to_str())
    assert tokenizer.end_name == "<|endoftext|>"
    assert tokenizer.ending_with("<|endoftext|>") is tokenizer
    other = tokenizer.ending_with("<|im_end|>")
    assert (other.end, other.end_name) == (271, "<|im_end|>")
    assert other.vocabulary == tokenizer.vocabulary
    assert other.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()
    # The library reads the definition in the same way.
    assert hf.Tokenizer.from_str(other.to_json()).encode("sea").ids[-1] == 271
    with pytest.raises(PolyvisionError, match=r"Valid: <pad>, <\|endoftext\|>, <\|im_end\|>"):
        tokenizer.ending_with("whale")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("bytes", TokenizerSpec("bytes", 256)),
        ("bpe:257", TokenizerSpec("bpe", 257)),
        ("bpe:270", TokenizerSpec("bpe", 270)),
    ],
)
def test_parse(text: str, spec: TokenizerSpec) -> None:
    assert parse_tokenizer(text) == spec
    assert spec.make([SAMPLE]).vocab_size == spec.vocab_size


RANGE = "write bpe:<vocabulary> with a vocabulary of 257 to 1048576 tokens"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bbpe", "unknown tokenizer 'bbpe'. Did you mean 'bpe'? Valid: bytes, bpe:<vocabulary>, "),
        ("byte", "unknown tokenizer 'byte'. Did you mean 'bytes'?"),
        ("bytes:300", "unknown tokenizer 'bytes:300'."),
        ("", "unknown tokenizer ''."),
        ("bpe", f"tokenizer 'bpe': {RANGE}"),
        ("bpe:12", f"tokenizer 'bpe:12': {RANGE}"),
        ("bpe:256", RANGE),
        ("bpe:-5", RANGE),
        ("bpe:1k", RANGE),
        ("bpe:1_000", RANGE),
        ("bpe:99999999", RANGE),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(PolyvisionError, match=re.escape(message)):
        parse_tokenizer(text)


def word_level() -> str:
    return hf.Tokenizer(hf.models.WordLevel({"a": 0}, "a")).to_str()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "must be a byte-level BPE"),
        (word_level(), "must be a byte-level BPE"),
        (json.dumps(json.loads(BPE.to_json()) | {"decoder": None}), "must be a byte-level BPE"),
        ('{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}', "not usable"),
    ],
)
def test_what_is_not_a_tokenizer(text: str, message: str) -> None:
    with pytest.raises(PolyvisionError, match=f"tokenizer definition: .*{message}"):
        tokenizer_from_json(text)
