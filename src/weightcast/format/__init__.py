"""The formats that both ends must agree on: tensors, regions, buckets, the plan, bytes, control messages.

This code opens no socket, starts no thread and knows no transport.
"""
