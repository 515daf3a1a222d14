"""What travels: tensors, regions and buckets as records, the plan of buckets, their bytes, and the control messages.

Here belongs what both ends must agree on. Nothing here opens a socket, starts a thread or knows a transport.
"""
