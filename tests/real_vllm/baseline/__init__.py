"""BASELINE, not weightcast: how a third party writes a weight transfer for vLLM today, to be measured against."""
