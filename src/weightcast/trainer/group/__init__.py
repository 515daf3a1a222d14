"""Trainer ranks that publish together: how they find each other, who packs which shard, one error for all.

Here belongs what is of no use to a trainer of one rank.
"""
