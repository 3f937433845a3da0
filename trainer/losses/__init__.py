"""Losses over candidate scores. Each returns the sum over queries; callers divide it by the global batch size."""
