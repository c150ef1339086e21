"""What is kept of runs and models: the only importers of mlflow."""
