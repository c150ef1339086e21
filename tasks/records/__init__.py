"""Records of runs and models: the only importers of mlflow."""
