"""A search of training parameters, by trainings in one process."""
