"""The router: clients speak OpenAI's or Anthropic's API, prefill runs in vLLM, decode in the pool chosen for it."""
