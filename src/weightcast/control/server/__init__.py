"""The reference server: an engine behind the control routes, with completions in the OpenAI format and metrics.

Here belongs what only this server has. Routes that plugins share are in `control.routes`.
"""
