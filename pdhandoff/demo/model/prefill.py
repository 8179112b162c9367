"""The demo's prefill engine, the vLLM-like side: paged fp8 caches, chunked prefill, a draft phase after each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import msgspec
from torch import Tensor

from pdhandoff.demo.model.network import Network
from pdhandoff.demo.model.pages import PageAllocator, PagedCache, PagedTensors
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["PrefillEngine", "Progress"]


@final
class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one request's prefill has come."""

    target_tokens: int
    "rows of the target layers that are in the caches, from token 0 on"
    draft_tokens: int
    "rows of the draft layer that are in the caches; a sender may read up to here"
    prompt_tokens: int
    new_pages: tuple[int, ...]
    "page ids that this call added to the request's block table"
    first_token: int | None = None
    "the sampled token, once the target has seen the whole prompt"

    @property
    def finished(self) -> bool:
        """Whether every row of the prompt is in the caches."""
        return self.draft_tokens == self.prompt_tokens


@final
class _Request:
    """What the engine keeps of one request."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.table: list[int] = []
        self.target_tokens = 0
        self.draft_tokens = 0
        self.hidden: Tensor | None = None  # of rows draft_tokens .. target_tokens - 1
        self.first_token: int | None = None


@final
class PrefillEngine:
    """Prefills prompts in chunks; requests take turns as the caller likes. Greedy, one thread.

    Args:
        network: the model.
        pages: pages per layer, the null page 0 included.
        seed: of the order in which pages are handed out.
    """

    def __init__(self, network: Network, *, pages: int = 64, seed: int = 0) -> None:
        self.network = network
        self.config = network.config
        self.tensors = PagedTensors(network.config, pages)
        self._allocator = PageAllocator(pages, seed)
        self._requests: dict[int, _Request] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return self._allocator.free_pages

    def add(self, prompt: Sequence[int]) -> int:
        """Take a prompt in; nothing is computed yet. Returns the request's number.

        Raises:
            LocalError: the prompt is empty, or holds a token that the model does not know.
        """
        tokens = tuple(prompt)
        if not tokens:
            raise LocalError(ErrorCode.MISUSE, "the prompt is empty: there is nothing to prefill")
        unknown = next((token for token in tokens if not 0 <= token < self.config.vocabulary), None)
        if unknown is not None:
            raise LocalError(
                ErrorCode.MISUSE, f"token {unknown} lies outside the vocabulary of {self.config.vocabulary}"
            )
        if len(tokens) >= self.config.max_seq_len:
            raise LocalError(
                ErrorCode.TOO_LARGE,
                f"the prompt has {len(tokens)} tokens: {self.config.max_seq_len - 1} leave room for one more",
            )
        self._next += 1
        self._requests[self._next] = _Request(tokens)
        return self._next

    def step(self, request: int, chunk: int) -> Progress:
        """Prefill up to `chunk` more tokens: the target's phase, then the draft's."""
        begun = self.step_target(request, chunk)
        ended = self.step_draft(request)
        return msgspec.structs.replace(ended, new_pages=begun.new_pages)

    def step_target(self, request: int, chunk: int) -> Progress:
        """The target layers' phase of one step. The chunk's draft rows are not there yet.

        Raises:
            LocalError: the former chunk's draft phase was left out, nothing is left to prefill, or no page is free.
        """
        state = self._state(request)
        if chunk < 1 or state.target_tokens == len(state.prompt) or state.hidden is not None:
            raise LocalError(
                ErrorCode.MISUSE,
                f"request {request}: a chunk of {chunk} cannot follow {state.target_tokens} target rows and "
                f"{state.draft_tokens} draft rows of {len(state.prompt)}: run the draft phase, or stop",
            )
        start = state.target_tokens
        stop = min(start + chunk, len(state.prompt))
        new_pages = self._allocator.take(-(-stop // self.config.page_tokens) - len(state.table))
        state.table.extend(new_pages)
        state.hidden = self.network.target(self._cache(state), start=start, tokens=state.prompt[start:stop])
        state.target_tokens = stop
        if stop == len(state.prompt):
            state.first_token = self.network.greedy(state.hidden[-1:])[0]
        return self._progress(state, new_pages)

    def step_draft(self, request: int) -> Progress:
        """The draft layer's phase: rows for the chunk that `step_target` ran.

        Row p takes the token at p + 1: of the prompt, also at the end of a chunk, and the sampled one at its end.

        Raises:
            LocalError: there is no chunk without its draft rows.
        """
        state = self._state(request)
        if state.hidden is None:
            raise LocalError(ErrorCode.MISUSE, f"request {request}: there is no chunk that lacks its draft rows")
        following = list(state.prompt[state.draft_tokens + 1 : state.target_tokens + 1])
        if state.first_token is not None:
            following.append(state.first_token)
        self.network.draft(self._cache(state), start=state.draft_tokens, hidden=state.hidden, next_tokens=following)
        state.draft_tokens = state.target_tokens
        state.hidden = None
        return self._progress(state, ())

    def progress(self, request: int) -> Progress:
        """Where the request stands."""
        return self._progress(self._state(request), ())

    def prompt(self, request: int) -> tuple[int, ...]:
        """The request's prompt."""
        return self._state(request).prompt

    def block_table(self, request: int) -> tuple[int, ...]:
        """The request's page ids; position i holds tokens 64 i .. 64 i + 63."""
        return tuple(self._state(request).table)

    def preempt(self, request: int) -> None:
        """Take the request's pages away. Its next step starts over, on other pages."""
        state = self._state(request)
        self._allocator.give_back(state.table)
        self._requests[request] = _Request(state.prompt)

    def free(self, request: int) -> None:
        """Forget the request and free its pages."""
        self._allocator.give_back(self._state(request).table)
        del self._requests[request]

    def _state(self, request: int) -> _Request:
        state = self._requests.get(request)
        if state is None:
            raise LocalError(ErrorCode.MISUSE, f"there is no request {request}: it was freed, or never added")
        return state

    def _cache(self, state: _Request) -> PagedCache:
        return PagedCache(self.tensors, state.table)

    def _progress(self, state: _Request, new_pages: Sequence[int]) -> Progress:
        return Progress(
            target_tokens=state.target_tokens,
            draft_tokens=state.draft_tokens,
            prompt_tokens=len(state.prompt),
            new_pages=tuple(new_pages),
            first_token=state.first_token,
        )
