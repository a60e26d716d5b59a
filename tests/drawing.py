"""How many examples hypothesis draws for a test: as many as the test says, twenty times as many in a long run."""

from __future__ import annotations

from hypothesis import settings

USUAL_EXAMPLES = 60
"""Of a test that says nothing. The profile of a long run has a multiple of it: see conftest.py."""


def examples(count: int, **options: int) -> settings:
    """The settings of a test that draws `count` examples; they fit as a decorator."""
    return settings(max_examples=count * settings.default.max_examples // USUAL_EXAMPLES, **options)
