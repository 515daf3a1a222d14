"""The trainer's side: the publisher, one publish run, its fleet of engines and its report.

This code runs in the training process. It uses sources and transports only through `seams`. `group`: several ranks.
"""
