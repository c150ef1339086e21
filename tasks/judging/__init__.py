"""Which model may serve: gates, baseline, judgement."""
