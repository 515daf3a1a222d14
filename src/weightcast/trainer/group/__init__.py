"""Several trainer ranks that publish together: rendezvous, assignment of shards to ranks, one error for all ranks.

Code that a trainer of one rank does not need.
"""
