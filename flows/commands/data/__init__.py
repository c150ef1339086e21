"""The commands for files of rows: propose a schema, write synthetic days, predict."""
