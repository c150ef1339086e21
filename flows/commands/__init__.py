"""Commands of `heterps` that look at the services: one module each, with its HELP, `add_arguments` and `run`."""
