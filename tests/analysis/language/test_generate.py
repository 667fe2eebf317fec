"""``polyvision generate``: the verb, where texts stop, and what it says to bad input."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyvision.analysis.language import generate as verb
from polyvision.analysis.language.generate import Continuation
from polyvision.analysis.language.trained import TrainedModel, open_language_model
from polyvision.cli import main
from polyvision.data.text.tokenizers import BPETokenizer, ByteTokenizer
from polyvision.models.language.generation import generate


def opened(run: Path) -> TrainedModel:
    return open_language_model(
        argparse.Namespace(run_or_checkpoint=run, weights=None, device="cpu", precision="32")
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert main(["generate", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_text_is_that_of_the_python_function(byte_run, capsys) -> None:
    out, err = call(
        capsys, byte_run, "--prompt", "the w", "--max-new-tokens", 20, "--seed", 3, "--top-k", 9
    )
    trained = opened(byte_run)
    prompt = torch.tensor([list(b"the w")])
    ids = generate(trained.model, prompt, 20, temperature=0.8, top_k=9, seed=3)
    assert out == trained.tokenizer.decode(ids[0].tolist()) + "\n"
    assert err.startswith("20 tokens in ")
    assert "tokens/s" in err
    assert "last.ckpt, step 7" in err


def test_a_batch_gives_what_each_prompt_gives_alone(bpe_run, tmp_path, capsys) -> None:
    prompts = ["the whale", "a café in Nantucket and the sea, ", ""]
    (tmp_path / "prompt.txt").write_text(prompts[1])
    greedy = ["--temperature", 0, "--max-new-tokens", 18]
    out, _ = call(
        capsys, bpe_run, *greedy,
        "--prompt", prompts[0], "--prompt", prompts[2], "--prompt-file", tmp_path / "prompt.txt",
    )  # fmt: skip
    alone = [
        call(capsys, bpe_run, *greedy, "--prompt", prompts[i])[0].rstrip("\n") for i in (0, 2, 1)
    ]
    expected = "\n".join(f"--- {i} of 3 ---\n{text}" for i, text in enumerate(alone, start=1))
    assert out.rstrip("\n") == expected
    streamed, _ = call(capsys, bpe_run, *greedy, "--prompt", prompts[0], "--stream")
    assert streamed.rstrip("\n") == alone[0]


def test_a_seed_gives_a_prompt_the_same_text_in_any_company(bpe_run, capsys) -> None:
    prompts = ["the whale", "a café in Nantucket", "the sea"]
    drawn = ["--seed", 5, "--max-new-tokens", 15]

    def texts(*arguments: object) -> list[str]:
        out, _ = call(capsys, bpe_run, *drawn, *arguments)
        return [part.strip("\n") for part in re.split(r"--- \d of \d ---\n", out) if part]

    alone = [text for prompt in prompts for text in texts("--prompt", prompt)]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert texts(*given) == alone
    assert texts(*given, "--batch-size", 2) == alone
    assert texts(*given, "--stream") == alone
    twice = texts("--prompt", prompts[0], *given)
    assert [twice[0], *twice[2:]] == alone
    assert twice[1] != alone[0]  # another sample of the same prompt


def test_an_end_token_ends_the_text(bpe_run, monkeypatch) -> None:
    trained = opened(bpe_run)
    tokens = iter([*trained.tokenizer.encode("the sea").tolist(), trained.tokenizer.end, 70])
    monkeypatch.setattr(
        verb, "stream", lambda *_, **__: (torch.tensor([token]) for token in tokens)
    )
    (made,) = verb.continue_texts(trained, [trained.tokenizer.encode("x")], 99)
    assert (made.text, made.ended) == ("the sea", "end token")
    assert next(tokens) == 70  # nothing was computed after it


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop_whatever_the_tokens(text, stops) -> None:
    said = Continuation(ByteTokenizer(), stops)
    shown = "".join(said.add(byte) for byte in text.encode()) + said.close()
    ends = [i for stop in stops if (i := text.find(stop)) >= 0]
    # Of stops that overlap, the one that is complete first ends the text.
    complete = [i + len(s) for s in stops if (i := text.find(s)) >= 0]
    if ends:
        first = min(complete)
        cut = min(i for s in stops if (i := text.find(s)) >= 0 and i + len(s) == first)
        assert said.ended == "stop text"
        assert shown == said.text == text[:cut]
    else:
        assert shown == said.text == text
        assert said.ended is None


def test_bytes_that_are_not_utf8_are_shown_as_replaced() -> None:
    said = Continuation(ByteTokenizer())
    assert [said.add(0xC3), said.add(ord("a")), said.add(0xE2), said.close()] == ["", "�a", "", "�"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt-file", "no.txt"], "--prompt-file no.txt: No such file"),
        (["--num-beams", "4"], "unknown option of polyvision generate '--num-beams'. Valid: --bat"),
        (["--repetition-penalty", "1.1"], "generate '--repetition-penalty'. Valid: --batch-size"),
        (["--prompt", "\udcff"], "is not UTF-8"),
        (["--stop", ""], "--stop ''"),
        (["--seed", "-1"], "--seed must be"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--top-k", "0"], "top_k must be 1 or more"),
        (["--top-p", "2"], "top_p must be greater than 0"),
        (["--max-new-tokens", "-1"], "max_new_tokens must be 0 or more"),
        (["--weights", "best"], "has no checkpoint yet"),
    ],
)
def test_mistakes_are_one_line(byte_run, capsys, arguments, text) -> None:
    assert main(["generate", str(byte_run), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_prompt_is_utf8_in_an_ascii_locale_too(byte_run, capsys) -> None:
    given = "naïve 😀".encode().decode("ascii", "surrogateescape")  # as sys.argv has it there
    out, _ = call(capsys, byte_run, "--prompt", given, "--max-new-tokens", 0)
    assert out == "naïve 😀\n"


def test_a_prompt_file_is_text_without_a_byte_order_mark(byte_run, tmp_path, capsys) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfthe sea")
    out, _ = call(capsys, byte_run, "--prompt-file", file, "--max-new-tokens", 0)
    assert out == "the sea\n"
    file.write_bytes(b"PK\x03\x04")
    assert main(["generate", str(byte_run), "--prompt-file", str(file)]) == 2
    assert f"--prompt-file {file} is a zip archive" in capsys.readouterr().err


def test_what_is_no_language_model_is_refused(tmp_path, capsys) -> None:
    assert main(["generate", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_run_without_tokenizer_is_refused(byte_run, tmp_path, capsys) -> None:
    import shutil

    shutil.copytree(byte_run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert main(["generate", str(tmp_path / "run")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_the_first_token_is_an_end_token_or_a_line_end(byte_run, bpe_run) -> None:
    assert opened(byte_run).first == ord("\n")
    bpe = opened(bpe_run)
    assert isinstance(bpe.tokenizer, BPETokenizer)
    assert bpe.first == bpe.tokenizer.end is not None
