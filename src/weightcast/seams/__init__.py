"""The Protocols of a source, a transport, an engine and an engine's client, and the order of their calls.

Third parties implement these. This package has no code of its own.
"""
