"""What an error of `same_as_one_process` names: the tail of a model, its wrong line, the cause."""

import inspect


def assert_named(error, function, code, cause):
    """Assert that an error names the tail that calls `function`, the line with `code`, a cause."""
    text = str(error.value)
    lines, start = inspect.getsourcelines(function)
    (at,) = [start + place for place, line in enumerate(lines) if code in line]
    assert "tail (Tail): " in text
    assert f"{inspect.getsourcefile(function)}:{at}\n" in text, text
    assert cause in text, text
