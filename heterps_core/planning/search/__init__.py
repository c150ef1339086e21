"""Methods that search a plan, and the bound that proves one."""
