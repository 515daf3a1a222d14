"""Checkpoint form: a live module's tensors under the names of its checkpoint, sharded or not; checkpoint files.

This code reads modules (names, conversions, shards, adapters) and checkpoint directories. It does not send or install.
"""
