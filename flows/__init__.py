"""Stories that a user can run, one file each; they read like a table of contents."""
