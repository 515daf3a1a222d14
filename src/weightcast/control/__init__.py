"""The control protocol: over HTTP, both ends; in one process; and as a method of an engine's workers.

The records of control messages are in `format.messages`, their effects in `serving.worker`.
"""
