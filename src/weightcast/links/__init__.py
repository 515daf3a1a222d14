"""Connections between a publisher and its workers, and the watchdog process that outlives the publisher.

Code here knows which peers are alive and the messages that they sent. The readers of a message decide its meaning.
"""
