"""Many small cases in one test: what pytest needs for a test of its own is more than such a case computes.

Owns the decorator. Never chooses cases. Invariant: a case that fails is named, as in a test of its own.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

Test = Callable[..., None]


def every(names: str | tuple[str, ...], values: Sequence[Any]) -> Callable[[Test], Test]:
    """As pytest.mark.parametrize, within one test."""
    called = (names,) if isinstance(names, str) else names

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def all_of_them(**fixtures: Any) -> None:
            for value in values:
                case = dict(zip(called, (value,) if isinstance(names, str) else value, strict=True))
                try:
                    test(**fixtures, **case)
                except BaseException as error:
                    error.add_note(f"with {case}")
                    raise

        left = [it for name, it in signature.parameters.items() if name not in called]
        all_of_them.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return all_of_them

    return decorate
