"""The engine's side: the worker, a publisher's session with it, one update, and how buckets are installed.

This code runs in the serving process. It uses engines and transports only through `seams`.
"""
