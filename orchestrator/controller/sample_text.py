"""The text of one sample, token by token: whole characters, without what may begin a stop text, cut where one is found.

Equal tokens give equal pieces, so a controller that comes back from the journal goes on exactly where its tokens end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longprefill.orchestrator.hosts.contract import DecodeToken
from longprefill.orchestrator.job import TokenRecord
from longprefill.orchestrator.stop_text import StopText
from longprefill.workers.model.tokenizer import StreamDecoder, Tokenizer


class SampleText:
    """Makes records of a sample's tokens. Without a tokenizer texts are empty and nothing stops."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stop = StopText(stop)
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def replay(self, tokens: Iterable[int], finish_reason: str | None) -> None:
        """Tokens that are durable already."""
        for token in tokens:
            self.num_tokens += 1
            if self._decoder is not None:
                self._stop.push(self._decoder.push(token))
        self.finish_reason = finish_reason

    def push(self, token: DecodeToken) -> TokenRecord:
        """The sample's next token. A stop token's own text is not part of the sample's."""
        assert token.index == self.num_tokens
        assert self.finish_reason is None
        self.num_tokens += 1
        self.finish_reason = token.finish_reason
        text = ""
        if self._decoder is not None:
            if token.finish_reason != "stop":
                text = self._stop.push(self._decoder.push(token.token))
            if token.finish_reason is not None:
                text += self._stop.push(self._decoder.finish()) + self._stop.finish()
            if self._stop.is_reached:
                self.finish_reason = "stop"
        return TokenRecord(
            sample=token.sample,
            index=token.index,
            token=token.token,
            text=text,
            logprob=token.logprob,
            top_logprobs=token.top_logprobs,
            finish_reason=self.finish_reason,
        )
