"""A live module in checkpoint form: its tensors under the names of its checkpoint, as views, sharded or not.

Here belongs what reads modules (names, conversions, shards, adapters, changes). Nothing here sends or installs.
"""
