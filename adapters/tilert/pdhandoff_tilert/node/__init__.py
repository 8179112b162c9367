"""The decode node: takes handoffs into a live engine and serves tokens over HTTP."""
