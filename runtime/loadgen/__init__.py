"""The load generator: requests sent to an OpenAI-compatible server as a plan says, timed, counted and summed up.

Order of reading: http (bytes on the wire, stamped as they come), sse (a body's events), workload (what to ask),
arrivals (when), answer (what one reply says). Then load (runs a plan) and measure (figures of a run). It shares the
machine with the server it measures, so what can wait until after a run is not done during it.
"""
