"""The ways in which buckets travel. Each is found by its URL scheme (`weightcast.registry`); none imports another."""
