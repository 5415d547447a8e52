"""Where requests are prepared: away from the event loop, so that no text holds up other clients."""

import asyncio
from typing import Any

from ckdist.serve.requests.prepare import prepare
from ckdist.serve.requests.prepared import ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer


class TextWork:
    """Prepares requests with one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    async def prepare(self, kind: str, body: bytes, facts: ModelFacts) -> Prepared | dict[str, Any]:
        """As `ckdist.serve.requests.prepare.prepare`, and raises what it raises."""
        return await asyncio.to_thread(prepare, kind, body, self.tokenizer, facts)
