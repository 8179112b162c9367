"""Prefill side for vLLM: a KV connector that hands a request's state off while it is being computed."""
