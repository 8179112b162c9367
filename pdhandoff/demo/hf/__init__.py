"""A small decode engine that loads models in Hugging Face's format: Llama, and DeepSeek-V3 with its draft layer.

It computes what vLLM computes, in plain torch on CPU, so that a handoff from a real vLLM can be checked token by token.
`create` is the factory that a decode node calls (`pdhandoff.demo.hf:create`).
"""

from pdhandoff.demo.hf.engine import create

__all__ = ["create"]
