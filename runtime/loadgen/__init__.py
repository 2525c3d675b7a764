"""The load generator: sends requests to an OpenAI-compatible server on a schedule, and measures them.

Order of reading: http (bytes on the wire, stamped as they come), sse (a body's events), workload (what to ask),
arrivals (when), answer (what one reply says). Then load (runs a plan) and measure (figures of a run). It shares the
machine with the measured server, so work that can wait is done after the run.
"""
