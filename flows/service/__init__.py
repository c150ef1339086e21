"""`make serve`: Prefect, MLflow and the serving process on one machine, watched and recovered."""
