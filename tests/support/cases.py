"""Many short cases in one test."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def cases(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but one test runs all cases and names the one that fails.

    pytest and its workers take 2 ms for a test: more than most cases of a kernel.
    """
    keys, rows = names.split(", "), list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*instance: Any, **fixtures: Any) -> None:
            for row in rows:
                case = dict(zip(keys, row if len(keys) > 1 else [row], strict=True))
                try:
                    test(*instance, **fixtures, **case)
                except Exception as error:
                    raise AssertionError(", ".join(f"{key}={value!r:.80}" for key, value in case.items())) from error

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=others)
        return run

    return decorate
