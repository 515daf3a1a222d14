"""Measures what a publish costs on this machine, against what it could do and against what buckets replaced.

Engines are processes of their own behind the real control routes, the publisher is this process (and further ones,
where the model is sharded), and nothing is tuned: torch's threads, the bucket size and the digests are a user's
defaults. `result.py` says what each figure means.
"""
