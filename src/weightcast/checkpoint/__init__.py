"""Checkpoint form: a live module's tensors under the names of its checkpoint, sharded or not; checkpoint files.

Here belongs what reads modules (names, conversions, shards, adapters) and checkpoint directories. Nothing here sends
or installs.
"""
