"""The protocol, sans-IO: no socket, thread, clock or randomness. Bytes and times in, messages and effects out.

`link` is one connection, `producer` and `consumer` are the two sides of all handoffs, `book` says who owns landing
memory.
"""
