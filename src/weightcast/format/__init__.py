"""Everything that both ends must agree on: records of tensors, regions and buckets, the plan, bytes, control messages.

Nothing here opens a socket, starts a thread or knows a transport.
"""
