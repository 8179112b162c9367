"""A decode engine's side, as small as it gets: announce a handoff, wait for it, convert it into the engine's cache.

    python examples/consumer.py [HOST:PORT]

Prints the command that hands a request off to it, takes that one, says what came, and ends.
"""

from __future__ import annotations

import ctypes
import sys

from pdhandoff import Consumer, HandoffFailed, HandoffId, PageTable, Placement
from pdhandoff.layouts import catalogue, profiles

LAYOUT = catalogue.build("vllm.flash_attn", profiles.gqa("example", layers=2, heads=2, head_elements=8))
PAGES = 16


def main() -> int:
    """Serve one request."""
    (component,) = LAYOUT.components
    page_bytes = component.planes[0].page_stride
    # the engine's own cache, one buffer a layer: a real engine gives the addresses of its tensors
    cache = [(ctypes.c_ubyte * (PAGES * page_bytes))() for _ in component.layers]
    placement = Placement(PAGES, {"": [ctypes.addressof(layer) for layer in cache]})

    listen = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:0"
    with Consumer(mover="loopback", layout=LAYOUT, arena_bytes=16 << 20, listen=listen) as consumer:
        handoff = HandoffId.mint()  # a real front end sends it with the request
        ticket = consumer.announce(handoff, deadline_s=60)
        print(f"{sys.executable} examples/producer.py {consumer.address} {handoff}", flush=True)
        try:
            # leaving the block frees the landing memory, however it ends
            with ticket.wait() as arrival:
                pages = -(-arrival.prompt_tokens // component.page_tokens)
                table = PageTable(range(3, 3 + pages), component.page_tokens)  # pages that the engine gives the request
                arrival.convert_into({component.name: placement}, pages={component.name: table})
                tokens, first = arrival.prompt_tokens, arrival.value("first_token")
        except HandoffFailed as error:
            print(f"no state: {error}")
            return 1
    print(f"{tokens} tokens, decode from token {first}, sum of all bytes {sum(map(sum, cache))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
