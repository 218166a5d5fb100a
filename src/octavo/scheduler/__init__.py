"""Who gets how many tokens in the next step."""
