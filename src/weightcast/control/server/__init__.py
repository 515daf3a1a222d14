"""The reference server: an engine behind the control routes, with completions in the OpenAI format and metrics.

The weight routes, which engines' plugins mount too, are in `control.routes`.
"""
