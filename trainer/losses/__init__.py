"""Losses over candidate scores. A loss returns a sum over queries; callers divide the sum by the global batch size."""
