"""Published clients of the HTTP interfaces, loaded when the first test uses them: every worker collects every test, and
they take two seconds to load. The linter refuses them at the head of a module (TID253).
"""

import importlib


class Client:
    """A module under the name that it has once it is loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("_"):  # pytest asks everything in a test's module whether it is a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


anthropic, ollama, openai = Client("anthropic"), Client("ollama"), Client("openai")
