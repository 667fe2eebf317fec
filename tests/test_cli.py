"""The command line itself: what every verb shares."""

import pytest

from polyvision import cli


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["comprae"], "unknown verb 'comprae'. Did you mean 'compare'?"),
        (["env", "--jsn"], "unknown option of polyvision env '--jsn'."),
        (["compare", "runs", "--allwo=seed"], "'--allwo'. Did you mean '--allow'?"),
        (["analyse", "cost", "a", "b"], "polyvision analyse does not take b: see polyvision"),
    ],
)
def test_mistakes_are_one_line(arguments, text, capsys):
    assert cli.main(arguments) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert errors.count("\n") == 1
