"""Connections between a publisher and its workers, and the watchdog process that outlives the publisher.

Here belongs who is alive and what they said, message by message. What a message means is decided by its readers.
"""
