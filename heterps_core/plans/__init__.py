"""The nouns: scheduling plan and provisioning plan."""
