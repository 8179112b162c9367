"""A prefill engine's side, as small as it gets: offer, push each chunk when it is computed, commit.

    python examples/producer.py HOST:PORT HANDOFF

`examples/consumer.py` prints this command with both filled in.
"""

from __future__ import annotations

import ctypes
import sys

from pdhandoff import HandoffFailed, HandoffId, Placement, Producer
from pdhandoff.layouts import catalogue, profiles

LAYOUT = catalogue.build("vllm.flash_attn", profiles.gqa("example", layers=2, heads=2, head_elements=8))
PAGES = 32
PROMPT_TOKENS = 100
CHUNK = 32


def main() -> int:
    """Hand one request off."""
    (component,) = LAYOUT.components
    page_bytes = component.planes[0].page_stride
    # the engine's paged cache, one buffer a layer: a real engine gives the addresses of its tensors
    cache = [(ctypes.c_ubyte * (PAGES * page_bytes))() for _ in component.layers]
    placement = Placement(PAGES, {"": [ctypes.addressof(layer) for layer in cache]})
    block_table = [19, 4, 27, 8, 1, 30, 12]  # pages that the engine gave the request, in the order of its tokens
    row_bytes = page_bytes // component.page_tokens

    with Producer(mover="loopback", layout=LAYOUT, placements={component.name: placement}, digest=True) as producer:
        # offered when prefill begins, so that granting memory overlaps with it
        outgoing = producer.offer(sys.argv[1], HandoffId.parse(sys.argv[2]), prompt_tokens=PROMPT_TOKENS, queue_s=30)
        total = 0
        for start in range(0, PROMPT_TOKENS, CHUNK):
            tokens = range(start, min(start + CHUNK, PROMPT_TOKENS))
            for layer, buffer in enumerate(cache):  # "prefill": every row is filled with a value of its own
                for token in tokens:
                    page, slot = block_table[token // component.page_tokens], token % component.page_tokens
                    value = (7 * token + layer) % 256
                    ctypes.memset(ctypes.addressof(buffer) + page * page_bytes + slot * row_bytes, value, row_bytes)
                    total += value * row_bytes
            outgoing.push(block_table, tokens=tokens)  # returns at once; a GPU engine passes its event as `after`
        outgoing.commit(first_token=42)
        outgoing.source_free.wait(30)  # the pages may go to other requests now
        try:
            outgoing.wait(30)
        except HandoffFailed as error:
            print(f"not handed off: {error}")
            return 1
    print(f"{PROMPT_TOKENS} tokens handed off, sum of all bytes {total}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
