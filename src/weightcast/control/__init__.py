"""The control protocol over HTTP, from both sides, and over a method of an engine's workers.

Here belongs what carries control messages. Their records are in `format.messages`, what they do in `serving.worker`.
"""
