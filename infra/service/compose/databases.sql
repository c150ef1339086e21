-- One PostgreSQL with a database for each service; run at the first start of its volume.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
CREATE DATABASE mlflow_auth;
