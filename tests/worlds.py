"""Numbers of ranks on which tests run: 1 and 3 in every run, 2 and 5 in the second tier."""

import pytest

WORLDS = (1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow))
