"""Movers: the interface, the registry, the loopback mover, and wrappers that add behaviour to any of them."""
