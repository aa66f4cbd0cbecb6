"""How the small policy of the demo gets its first weights: a random start, then a warm-up.

A policy that is loaded from a Hugging Face directory needs nothing of this.
"""
