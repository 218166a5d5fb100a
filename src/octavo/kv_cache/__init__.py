"""Bookkeeping of KV blocks. Touches no tensor."""
