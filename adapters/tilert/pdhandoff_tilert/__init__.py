"""Decode side for TileRT and other live engines: injection of landed state, the decode loop, and the decode node."""
