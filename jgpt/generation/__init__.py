"""Prompts to text."""
