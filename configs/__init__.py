"""Recipes: each file has get_config() and says in its docstring what it costs and gives."""
