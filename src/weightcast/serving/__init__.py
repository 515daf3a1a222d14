"""The engine's side: the worker, a publisher's session with it, one update, and how buckets go into an engine.

Here belongs what runs beside a model that serves. It knows engines and transports by their seams only.
"""
