"""Latency, training steps, complexity: what the tools measure."""
