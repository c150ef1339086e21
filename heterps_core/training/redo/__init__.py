"""The redo log: what each step changes, kept on two machines, so that a lost one costs at most one step."""
