"""Connections between a publisher and its workers, and the watchdog process that outlives the publisher.
`answers`: the errors that HTTP servers answer with.

Code here knows which peers are connected and passes on their messages. Other packages decide what a message means.
"""
