"""Measure acceptance rates by budget and length, on own samples or on given text."""
