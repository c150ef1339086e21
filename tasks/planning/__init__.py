"""What the steps of profiling and scheduling ask before a plan is made: job, deadline, markets, costs."""
