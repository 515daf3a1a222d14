"""The trainer's side: the publisher, one publish run, its fleet of engines and its report.

Here belongs what runs beside training. It knows sources and transports by their seams only. Several ranks: `group`.
"""
