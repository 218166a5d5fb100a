"""From what a caller wrote to token ids: chat template, tokenizer, input processor."""
