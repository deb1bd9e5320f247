"""Small helpers for a build farm."""
