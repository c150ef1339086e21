"""Measures layers, workers and links on the machine at hand."""

from datetime import timedelta

VALID_FOR = timedelta(days=30)
"""For how long a rented machine's profile counts.

Assumed: providers change processors' microcode, drivers and hosts without notice, and do not say how often; a
month of nights shares the cost of a measurement, and an old figure does not stay for ever.
"""

LOCAL_VALID_FOR = timedelta(days=7)
"""For how long a profile of the flow's own machine counts.

Assumed: a measurement costs seconds of a core, so the bound may be shorter than that of a rented machine; were it
shorter than a week, the plans of a week's nights would follow the noise between measurements.
"""
