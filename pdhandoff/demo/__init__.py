"""A tiny real model, prefilled in one process and decoded in another: the project's main job, end to end."""
