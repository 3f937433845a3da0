"""Losses over candidate scores. Each returns the sum over queries; callers divide by the global batch size."""
