"""Perplexity and benchmark requests against sums written out, and the verb around them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyvision.analysis.language import evaluate as verb
from polyvision.analysis.language.corpora import open_tokens
from polyvision.analysis.language.harness import PRESETS, harness_model, task_names
from polyvision.analysis.language.perplexity import score_tokens, spans
from polyvision.analysis.language.requests import Answerer, CutContexts
from polyvision.analysis.language.trained import TrainedModel, open_language_model
from polyvision.cli import main
from polyvision.errors import PolyvisionError
from polyvision.models.language.generation import generate

TEXT = "the white whale; a café in Nantucket and the sea. "


def opened(run: Path) -> TrainedModel:
    return open_language_model(
        argparse.Namespace(run_or_checkpoint=run, weights=None, device="cpu", precision="32")
    )


@given(st.integers(1, 9), st.integers(0, 30), st.integers(1, 8), st.data())
def test_spans_predict_each_token_once_with_all_the_context_there_is(first, more, context, data):
    stride = data.draw(st.none() | st.integers(1, context))
    made = list(spans(first, first + more, context, stride))
    predicted = [i for s in made for i in range(s.scored, s.end)]
    assert predicted == list(range(first, first + more))
    for span in made:
        assert span.end - span.start - 1 == min(context, span.end - 1)
        assert span.start < span.scored
    for before, after in pairwise(made):
        assert after.scored == before.end
        seen = after.scored - after.start
        assert seen >= min(after.scored, context - (stride or context) + 1)


def by_hand(trained: TrainedModel, tokens: list[int], first: int) -> tuple[float, bool]:
    """Sum log-probabilities, each token from at most ``context`` before it, one pass each."""
    total, greedy = 0.0, True
    for i in range(first, len(tokens)):
        seen = torch.tensor([tokens[max(0, i - trained.model.shape.context) : i]])
        logits = trained.model.double()(seen)[0, -1]
        total += logits.log_softmax(-1)[tokens[i]].item()
        greedy &= logits.argmax().item() == tokens[i]
    return total, greedy


def test_a_stride_of_one_gives_every_token_its_whole_context(byte_run) -> None:
    trained = opened(byte_run)
    tokens = trained.tokenizer.encode(TEXT)
    score = score_tokens(
        trained, lambda a, n: tokens[a : a + n], len(tokens), context=12, stride=1, batch_size=5
    )
    expected, _ = by_hand(opened(byte_run), tokens.tolist(), 1)
    assert score.nats == pytest.approx(-expected, rel=1e-5)
    assert score.tokens == len(tokens) - 1
    assert score.text_bytes == len(TEXT.encode()) - 1
    assert score.loss == pytest.approx(-expected / (len(tokens) - 1), rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2))


def test_windows_side_by_side_equal_the_loss_of_each(byte_run) -> None:
    trained = opened(byte_run)
    tokens = trained.tokenizer.encode(TEXT)[:37]
    score = score_tokens(trained, lambda a, n: tokens[a : a + n], 37, context=12, batch_size=2)
    rows = torch.from_numpy(tokens).unfold(0, 13, 12)
    nats = trained.model(rows[:, :-1], rows[:, 1:]).nats.item()
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.tokens == 36


def test_loglikelihood_is_the_sum_of_the_text_after_its_context(bpe_run) -> None:
    trained = opened(bpe_run)
    encode = trained.tokenizer.encode
    requests = [
        ("the white", " whale"),
        ("the white ", "whale"),  # the space counts as the text's
        ("", "the sea"),
        (" \n", "sea"),
        ("the sea", ""),
        (TEXT * 2, " Nantucket"),  # cut on the left
    ]
    found = Answerer(trained, batch_size=2).loglikelihood(requests)
    exact = opened(bpe_run)
    for (context, text), (value, greedy) in zip(requests, found, strict=True):
        bare = context.rstrip()
        whole = encode(context + text).tolist()
        whole, first = (whole, len(encode(bare))) if bare else ([trained.first, *whole], 1)
        expected = _one_window(exact, whole, first)
        assert value == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert greedy == expected[1]


def test_a_text_within_the_last_token_of_its_context_is_not_certain(bpe_run) -> None:
    """Two letters that make one token: there is no boundary between context and text."""
    trained = opened(bpe_run)
    encode = trained.tokenizer.encode
    pair = next(
        word
        for word in (b.decode(errors="replace") for b in trained.tokenizer.vocabulary)
        if len(word) == 2 and word.isalpha() and len(encode("x " + word)) == len(encode("x ")) + 1
    )
    for context in (pair[0], "x " + pair[0]):
        whole = encode(context + pair[1]).tolist()
        ((value, _),) = Answerer(trained).loglikelihood([(context, pair[1])])
        whole = whole if len(whole) > 1 else [trained.first, *whole]
        expected = _one_window(opened(bpe_run), whole, len(whole) - 1)
        assert value == pytest.approx(expected[0], rel=1e-5)
        assert value < 0


def _one_window(trained: TrainedModel, tokens: list[int], first: int) -> tuple[float, bool]:
    """Score the end of ``tokens`` in one pass over their last ``context`` + 1."""
    count = len(tokens) - first
    window = torch.tensor(tokens[-trained.model.shape.context - 1 :])
    logits = trained.model.double()(window[None, :-1])[0]
    values = logits.log_softmax(-1).gather(-1, window[1:, None])[:, 0]
    best = logits.argmax(-1) == window[1:]
    kept = slice(len(values) - count, None)
    return values[kept].sum().item(), bool(best[kept].all())


def test_only_the_most_likely_continuation_is_greedy(byte_run) -> None:
    trained = opened(byte_run)
    best = {
        c: trained.model(torch.tensor([[ord(c)]])).argmax().item() for c in map(chr, range(97, 123))
    }
    letter, code = next((c, i) for c, i in best.items() if i < 128)
    other = "a" if code != ord("a") else "b"
    found = Answerer(trained).loglikelihood([(letter, chr(code)), (letter, other)])
    assert [greedy for _, greedy in found] == [True, False]


def test_rolling_covers_a_text_of_any_length(byte_run) -> None:
    trained = opened(byte_run)
    short, long = Answerer(trained).loglikelihood_rolling(["sea", TEXT])
    exact = opened(byte_run)
    assert short == pytest.approx(by_hand(exact, list(b"\nsea"), 1)[0], rel=1e-5)
    tokens = np.array(list(b"\n" + TEXT.encode()))
    score = score_tokens(trained, lambda a, n: tokens[a : a + n], len(tokens), context=12)
    assert long == pytest.approx(-score.nats, rel=1e-5)


def test_generate_until_is_greedy_unless_asked_and_ends_before_the_stops(byte_run) -> None:
    trained = opened(byte_run)
    answerer = Answerer(trained, batch_size=2)
    contexts = ["the", "white whale", TEXT]
    plain = answerer.generate_until([(c, {"max_gen_toks": 6}) for c in contexts])
    for context, text in zip(contexts, plain, strict=True):
        prompt = torch.from_numpy(trained.tokenizer.encode(context)[-6:])[None]
        if len(context) <= 6:
            ids = generate(trained.model, prompt, 6, temperature=0)[0, prompt.shape[1] :]
            assert text == trained.tokenizer.decode(ids.tolist())
    stop = plain[0][2]
    (cut,) = answerer.generate_until([("the", {"max_gen_toks": 6, "until": [stop, ""]})])
    assert cut == plain[0][: plain[0].index(stop)]
    drawn = answerer.generate_until(
        [("the", {"max_gen_toks": 6, "do_sample": True, "temperature": 9.0})]
    )
    assert drawn != plain[:1]
    cold = {"max_gen_toks": 6, "do_sample": True, "temperature": 0}
    assert answerer.generate_until([("the", cold)]) == plain[:1]
    with pytest.raises(PolyvisionError, match=r"unknown options .*beams"):
        answerer.generate_until([("the", {"beams": 2})])


def test_contexts_that_are_cut_are_counted(byte_run) -> None:
    answerer = Answerer(opened(byte_run), batch_size=2)  # a context of 12 bytes
    answerer.loglikelihood([("the white whale", " sea"), ("the", " sea"), ("12345678", "90123")])
    cut = answerer.cut_contexts
    # 19 bytes of which the last is only predicted: 18 where 12 are seen; the third has 13.
    assert (cut.requests, cut.cut, cut.most) == (3, 1, 6)
    answerer.loglikelihood_rolling([TEXT])  # whole, in several windows
    assert (cut.requests, cut.cut, cut.most) == (4, 1, 6)
    answerer.generate_until([("x" * 20, {"max_gen_toks": 4}), ("x" * 8, {"max_gen_toks": 4})])
    assert (cut.requests, cut.cut, cut.most) == (6, 2, 12)
    assert cut.warning(12).startswith(
        "2 of 6 requests do not fit the model's context of 12 tokens: the beginning of each was "
        "cut, up to 12 tokens"
    )
    assert CutContexts(requests=9).warning(12) is None


def test_cut_contexts_are_said_once(byte_run, tmp_path, capsys, monkeypatch) -> None:
    """A stand-in for the harness: it asks one question that fits and one that does not."""

    def ask(answerer, tasks, manager, **_):
        answerer.loglikelihood([("the", " sea"), (TEXT, " sea")])
        return {"mine": {"acc": 0.5}}

    monkeypatch.setattr(verb, "require_harness", lambda: None)
    monkeypatch.setattr(verb, "evaluate_tasks", ask)
    monkeypatch.setattr(verb, "find_tasks", lambda *_: object())
    output = tmp_path / "found.json"
    assert main(["evaluate", str(byte_run), "--tasks", "mine", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("warning: 1 of 2 requests do not fit the model's context of 12 tokens") == 1
    lost = len((TEXT + " sea").encode()) - 13
    assert json.loads(output.read_text())["cut_contexts"] == {"requests": 2, "cut": 1, "most": lost}


def test_the_adapter_hands_requests_over(byte_run, monkeypatch) -> None:
    """A stand-in for the package: the class it derives from, and requests with ``args``."""
    module = ModuleType("lm_eval.api.model")
    module.LM = object
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    answerer = Answerer(opened(byte_run))
    model = harness_model(answerer)
    pair = SimpleNamespace(args=("the", " sea"))
    assert model.loglikelihood([pair]) == answerer.loglikelihood([("the", " sea")])
    text = SimpleNamespace(args=("the sea",))
    assert model.loglikelihood_rolling([text]) == answerer.loglikelihood_rolling(["the sea"])
    asked = SimpleNamespace(args=("the", {"until": "x", "max_gen_toks": 3}))
    assert model.generate_until([asked]) == answerer.generate_until([asked.args])


def test_presets() -> None:
    assert len(PRESETS["paper"]) == 13
    assert set(PRESETS["paper_dense"]) | set(PRESETS["paper_moe"]) <= set(PRESETS["paper"])
    assert task_names(["paper_dense", "piqa", "mine"]) == [*PRESETS["paper_dense"], "mine"]


def test_text_and_shards_of_it_give_the_same(bpe_run, tmp_path, capsys) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(TEXT[i:])
    prepared = tmp_path / "shards"
    tokenizer = str(bpe_run / "tokenizer.json")
    command = ["prepare-text", str(folder), "--tokenizer", tokenizer, "--out", str(prepared)]
    assert main([*command, "--val-fraction", "0", "--workers", "1", "--shard-tokens", "20"]) == 0
    output = tmp_path / "found.json"
    arguments = ["--data", str(folder), str(prepared), "--stride", "5", "--output", str(output)]
    assert main(["evaluate", str(bpe_run), *arguments]) == 0
    record = json.loads(output.read_text())
    text, shards = record["data"]
    for key in ("tokens", "bytes", "loss", "perplexity", "bits_per_byte"):
        assert text[key] == shards[key]
    trained = opened(bpe_run)
    assert text["bytes"] == sum(len(TEXT[i:].encode()) for i in range(3))
    tokens = open_tokens(str(prepared), trained.tokenizer)
    assert tokens.read(0, 2)[0] == trained.tokenizer.end
    assert (record["context"], record["stride"], record["step"]) == (12, 5, 7)
    shown = capsys.readouterr().out
    assert f"{text['loss']:.4f}" in shown
    assert "stride 5" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "say on what"),
        (["--data", "{empty}"], "there is no text in it"),
        (["--data", "{one}"], "there is a single token, with none before it"),
        (["--data", "none.txt"], "no such file"),
        (["--data", "{text}", "--context", "13"], "more than the model's context of 12"),
        (["--data", "{text}", "--context", "4", "--stride", "5"], "--stride 5 is more than"),
        (["--data", "{text}", "--stride", "0"], "--stride must be at least 1"),
        (["--data", "{text}", "--output", "{text}/x"], "cannot write"),
        (["--tasks", "paper", "--task-folder", "none"], "--task-folder none is not a folder"),
    ],
)
def test_mistakes_are_one_line(byte_run, tmp_path, capsys, arguments, text) -> None:
    (tmp_path / "empty.txt").write_text("  ")
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "one.txt").write_text("a")
    places = {name: tmp_path / f"{name}.txt" for name in ("empty", "text", "one")}
    assert main(["evaluate", str(byte_run), *(a.format(**places) for a in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_shards_of_another_tokenizer_are_refused(bpe_run, byte_run, tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    out = str(tmp_path / "shards")
    command = ["prepare-text", str(tmp_path / "a.txt"), "--tokenizer", "bytes", "--out", out]
    assert main([*command, "--val-fraction", "0", "--workers", "1"]) == 0
    assert main(["evaluate", str(bpe_run), "--data", out]) == 2
    assert "with another tokenizer (256 tokens" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(byte_run, monkeypatch, capsys) -> None:
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["evaluate", str(byte_run), "--tasks", "paper"]) == 2
    assert "pip install 'polyvision[eval]'" in capsys.readouterr().err
